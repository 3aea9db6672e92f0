// Products of 16-bit operands, and the exchange between the blocks of a thread-block cluster.

// Operands of products ------------------------------------------------------------------------------

// Two numbers in 16 bits each, the first in the lower half.
__device__ __forceinline__ u32 pack(float x, float y) {
  u32 p;
#if TYPE == 1
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p) : "f"(y), "f"(x));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(p) : "f"(y), "f"(x));
#endif
  return p;
}

__device__ __forceinline__ float2 unpack(u32 p) {
  float2 v;
#if TYPE == 1
  v = make_float2(__uint_as_float(p << 16), __uint_as_float(p & 0xffff0000u));
#else
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(v.x), "=f"(v.y) : "r"(p));
#endif
  return v;
}

__device__ __forceinline__ void multiply16(float (&c)[4], uint4 a, u32 b0, u32 b1) {
#if TYPE == 1
#define SHAPE16 "m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define SHAPE16 "m16n8k16.row.col.f32.f16.f16.f32"
#endif
  asm("mma.sync.aligned." SHAPE16 " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// The cluster ---------------------------------------------------------------------------------------

__device__ __forceinline__ u32 address_of(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// An address of this block's shared memory, in block `rank`.
__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The barrier expects `bytes` more in its present phase, which ends when they have come.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
#ifndef NO_EXCHANGE
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n\t}"
               ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ void start_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Whether this phase of a barrier has ended.
__device__ __forceinline__ u32 ended(u32 barrier, u32 phase) {
  u32 done;
  asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
               "selp.u32 %0, 1, 0, p;\n\t}"
               : "=r"(done) : "r"(barrier), "r"(phase & 1) : "memory");
  return done;
}

// With GUARD, for trials, who waited for a second or so waits no more.
struct Waiting {
  bool tired = false;
  __device__ __forceinline__ void until(u32 barrier, u32 phase) {
#ifndef NO_EXCHANGE
    u32 done;
#ifdef GUARD
    const i64 since = clock64();
    if (tired) return;
#endif
    do {
      done = ended(barrier, phase);
#ifdef GUARD
      if (!done && clock64() - since > (1ll << 31)) tired = done = true;
#endif
    } while (!done);
#endif
    __syncwarp();
  }
};

// Stores into the shared memory of another block, if `there`. `barrier`, in it, counts their bytes.
#define STORE "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\t@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"

__device__ __forceinline__ void send(bool there, u32 to, u32 barrier, uint4 v) {
  asm volatile(STORE ".v4.b32 [%0], {%3, %4, %5, %6}, [%1];\n\t}"
               ::"r"(to), "r"(barrier), "r"(u32(there)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void send(bool there, u32 to, u32 barrier, uint2 v) {
  asm volatile(STORE ".v2.b32 [%0], {%3, %4}, [%1];\n\t}"
               ::"r"(to), "r"(barrier), "r"(u32(there)), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void send(bool there, u32 to, u32 barrier, u32 v) {
  asm volatile(STORE ".b32 [%0], %3, [%1];\n\t}" ::"r"(to), "r"(barrier), "r"(u32(there)), "r"(v) : "memory");
}
