// Products of 16-bit operands, and the exchange between the blocks of a thread-block cluster.
#include "barriers.cuh"

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

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

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
