// Barriers in shared memory (mbarrier), whose phases count arrivals and bytes.

__device__ __forceinline__ u32 address_of(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// The address in distributed shared memory: the same place in block `rank` of the cluster.
__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void start_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at the barrier; its current phase also waits for `bytes` more bytes.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n\t}"
               ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until this phase of a barrier has completed.
__device__ __forceinline__ void await_phase(u32 barrier, u32 phase) {
  u32 done;
  do {
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done) : "r"(barrier), "r"(phase & 1) : "memory");
  } while (!done);
  __syncwarp();
}
