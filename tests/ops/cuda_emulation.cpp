// Runs a grid of emulated blocks. Compiled once; each kernel's library contains it.
#include "cuda_emulation.h"

#include <memory>

jmp_buf scheduler;
Fiber* current;
bool progress;
Index gridDim;
void (*body)();

static void enter() {
  body();
  current->block->threads--, current->block->cluster->threads--;
  current->done = progress = true;
  yield();
}

int run_grid(int columns, int rows, int threads, int shared, int cluster, int down, unsigned seed) {
  std::vector<Block> all(columns * rows);
  std::vector<Cluster> clusters(all.size());
  std::vector<Fiber> fibers(all.size() * threads);
  const size_t stack = 1 << 16;
  const std::unique_ptr<char[]> stacks(new char[fibers.size() * stack]);  // without values, which would take long
  gridDim = {unsigned(columns), unsigned(rows)};
  for (int i = 0; i < columns * rows; i++) {
    Block& b = all[i];
    const int x = i % columns, y = i / columns;
    b.rank = (down ? y : x) % cluster;
    b.cluster = &clusters[down ? (y - b.rank) * columns + x : i - b.rank];
    b.cluster->blocks.push_back(&b);
    b.threads = threads, b.cluster->threads += threads;
    b.warps.resize(threads / 32);
    b.memory.assign((shared + 15) / 16, make_uint4(~0u, ~0u, ~0u, ~0u));  // NaN
  }
  for (size_t i = 0; i < fibers.size(); i++) {
    const unsigned block = i / threads;
    Fiber& f = fibers[i];
    f.block = &all[block], f.warp = &all[block].warps[i % threads / 32];
    f.place = {block % columns, block / columns}, f.thread = {unsigned(i % threads), 0};
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = &stacks[i * stack], f.context.uc_stack.ss_size = stack;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  std::vector<Fiber*> order;
  for (Fiber& f : fibers) {  // in random order
    seed = seed * 1664525u + 1013904223u;
    order.insert(order.begin() + (seed >> 8) % (order.size() + 1), &f);
  }
  for (int idle = 0; !order.empty();) {
    progress = false;
    for (Fiber* f : order) {
      current = f;
      resume();
    }
    std::vector<Fiber*> left;
    for (Fiber* f : order)
      if (!f->done) left.push_back(f);
    order = left;
    idle = progress ? 0 : idle + 1;
    if (idle > 100) return 1;
  }
  return 0;
}
