// Products of 16-bit operands, and stores to the other blocks of a thread-block cluster.
#include "barriers.cuh"

// Operands of products ------------------------------------------------------------------------------

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

// If `there`, stores to the shared memory of another block, whose `barrier` counts the bytes.
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
