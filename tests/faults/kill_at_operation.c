/* Kills the process at its n-th change to the files of a folder. For LD_PRELOAD.
 *
 * Changes are: creating or truncating a file, writing, renaming, removing, and making a folder. A
 * kill at any other moment leaves the same files as a kill at the next change.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[4096];
static long left = -1, seen = 0;
static int torn = 0;

/* at: the number of the change, from 0; -1 only counts. halfway: die after half of a write. */
void arm(const char *path, long at, int halfway) {
    snprintf(folder, sizeof folder, "%s", path);
    left = at, torn = halfway, seen = 0;
}

long operations(void) { return seen; }

static int ours(const char *path) {
    return folder[0] && path && strncmp(path, folder, strlen(folder)) == 0;
}

/* Whether this is the change to die at. */
static int due(const char *path) {
    if (!ours(path)) return 0;
    return seen++ == left;
}

static int due_fd(int fd) {
    char link[64], path[4096];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return due(path);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

#define REAL(name, type, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name, int, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (flags & (O_CREAT | O_TRUNC) && due(path)) die(); \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int place, const char *path, int flags, ...) { \
        REAL(name, int, int, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (flags & (O_CREAT | O_TRUNC) && due(path)) die(); \
        return real(place, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write, ssize_t, int, const void *, size_t);
    if (due_fd(fd)) {
        if (torn) real(fd, data, size / 2);
        die();
    }
    return real(fd, data, size);
}

#define PWRITE(name, offset_type) \
    ssize_t name(int fd, const void *data, size_t size, offset_type offset) { \
        REAL(name, ssize_t, int, const void *, size_t, offset_type); \
        if (due_fd(fd)) { \
            if (torn) real(fd, data, size / 2, offset); \
            die(); \
        } \
        return real(fd, data, size, offset); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define TRUNCATE(name, offset_type) \
    int name(int fd, offset_type size) { \
        REAL(name, int, int, offset_type); \
        if (due_fd(fd)) die(); \
        return real(fd, size); \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

int rename(const char *from, const char *to) {
    REAL(rename, int, const char *, const char *);
    if (due(to)) die();
    return real(from, to);
}

int unlink(const char *path) {
    REAL(unlink, int, const char *);
    if (due(path)) die();
    return real(path);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir, int, const char *, mode_t);
    if (due(path)) die();
    return real(path, mode);
}
