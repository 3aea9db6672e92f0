// How the blocks of a team hand each other their sums. Columns are ordered from the block's own on: part s is
// for the block s ranks further, and for the thread that has the same number there. What comes is added in the
// order of the ranks before the own one, so that all ways give the same bits.
//
// With CLUSTER through distributed shared memory, into the slots, which the other has left before: each warp of
// it says so, after its last product with them. A warp waits only for the same warps of the others: a barrier
// (mbarrier) of its own counts the bytes as they come. PLAIN, for trials: ordinary stores and an arrival
// instead of stores that count themselves.
//
// Otherwise through L2, `handed` [GRID, TEAM - 1, SENT], and the same warpgroups of a team meet at a counter. TAGGED:
// they do not meet. The last bit of a sum says whether it is this step's: it is set in every other one, from the
// first on, `handed` being zero before. A thread looks until all its sums say so. With SEEN they are handed over to
// two places in turn: the others may still read those of the step before.
#define PART (SIDE / 2)
#if defined(NO_WAIT) && !defined(PLAIN)  // blocks that run ahead would count too far
#define PLAIN 1
#endif
#ifndef PLAIN
#define PLAIN 0
#endif

struct Team {
  uint4* handed;
  u32* counters;  // [GRID, 2]
  const uint4* slots;
  u32 barriers;  // WARPS for what comes, one for whether the others' slots are free
};

// An address of this block's shared memory, in block `rank`. Made anew each time: registers are scarce.
__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// That this warp's stores are done (PLAIN); and that it is done with reading, which takes no fence.
__device__ __forceinline__ void arrive_there(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void left_there(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void send(u32 to, u32 barrier, uint4 v) {
#if PLAIN
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#else
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];"
               ::"r"(to), "r"(barrier), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}

// Words of sums that say of which step they are, and whether they are of this one.
__device__ __forceinline__ uint4 tagged(uint4 v, u32 times) {
  const u32 tag = ~(times >> SEEN) & 1;
  return make_uint4(v.x & ~1u | tag, v.y & ~1u | tag, v.z & ~1u | tag, v.w & ~1u | tag);
}
__device__ __forceinline__ bool of_step(uint4 v, u32 times) {
#ifdef NO_WAIT
  return true;
#endif
  return (times >> SEEN & 1 ? v.x | v.y | v.z | v.w : ~(v.x & v.y & v.z & v.w)) % 2 == 0;
}

__device__ __forceinline__ uint4* handed_in(const Team& team, u32 times) {
  return team.handed + (SEEN ? i64(times & 1) * GRID * (TEAM - 1) * SENT : 0);
}

#define WARP_BYTES (COME * 16 / WARPS)

// Before the first step; all blocks of the cluster are there afterwards.
__device__ __forceinline__ void start_team(const Team& team) {
  if (!CLUSTER) return;
  if (threadIdx.x < WARPS) {
    start_barrier(team.barriers + 8 * threadIdx.x, PLAIN ? TEAM - 1 : 1);
    if (!PLAIN) expect(team.barriers + 8 * threadIdx.x, WARP_BYTES);
  } else if (threadIdx.x == WARPS) {
    start_barrier(team.barriers + 8 * WARPS, (TEAM - 1) * WARPS);
  }
  __syncwarp();
  meet_cluster();
}

// The slots may be written to by the others.
__device__ __forceinline__ void free_slots(const Team& team) {
  const u32 lane = threadIdx.x % 32;
  if (CLUSTER && lane < TEAM - 1)
    left_there(in_block(team.barriers + 8 * WARPS, (rank_in_team() + 1 + lane) % TEAM));
  __syncwarp();
}

// times: that sums were handed over before.
__device__ __forceinline__ void hand_over(const float (&sums)[COLUMNS / 2], const Team& team, u32 times) {
#ifdef NO_EXCHANGE
  return;
#endif
  if (TEAM == 1) return;
  const u32 rank = rank_in_team(), first = blockIdx.x - rank, warp = threadIdx.x / 32;
  if (CLUSTER) await_phase(team.barriers + 8 * WARPS, times);
#pragma unroll
  for (int s = 1; s < TEAM; s++) {
    const u32 other = (rank + s) % TEAM;
    uint4* to = handed_in(team, times) + i64((first + other) * (TEAM - 1) + s - 1) * SENT + threadIdx.x;
    u32 there = 0, barrier = 0;
    if (CLUSTER) {
      there = in_block(shared_address(team.slots), other);
      barrier = there + (team.barriers - shared_address(team.slots)) + 8 * warp;
      there += ((s - 1) * SENT + threadIdx.x) * 16;
    }
#pragma unroll
    for (int i = 0; i < PART / 4; i++) {
      const float* v = sums + s * PART + 4 * i;
      uint4 word = make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
      if (TAGGED && !CLUSTER) word = tagged(word, times);
      if (CLUSTER) send(there + i * THREADS * 16, barrier, word);
      else pass_word(to + i * THREADS, word);
    }
  }
  if (!CLUSTER && !TAGGED) {
    meet_half();
    if (threadIdx.x % 128 == 0) announce(team.counters + 2 * first + threadIdx.x / 128);
  }
  if (CLUSTER && PLAIN) {
    const u32 lane = threadIdx.x % 32;
    __syncwarp();
    if (lane < TEAM - 1) arrive_there(in_block(team.barriers + 8 * warp, (rank + 1 + lane) % TEAM));
  }
}

// Adds what the others handed over to sums[0 .. PART). nothing: zero.
__device__ __forceinline__ void take_over(float (&sums)[COLUMNS / 2], const Team& team, u32 times, u32 nothing) {
#ifdef NO_EXCHANGE
  return;
#endif
  if (TEAM == 1) return;
  const u32 barrier = team.barriers + 8 * (threadIdx.x / 32);
  const uint4* come = CLUSTER ? team.slots : handed_in(team, times) + i64(blockIdx.x) * (TEAM - 1) * SENT;
  come += threadIdx.x + nothing;
  if (CLUSTER) {
    await_phase(barrier, times + nothing);
    if (!PLAIN && threadIdx.x % 32 == 0) expect(barrier, WARP_BYTES);
  } else if (!TAGGED) {
    const u32* counter = team.counters + 2 * (blockIdx.x - rank_in_team()) + threadIdx.x / 128;
    if (threadIdx.x % 128 == 0) wait_until(counter, TEAM * (times + 1) + nothing);
    meet_half();
  }
  auto add = [&](int i, const uint4& v) {
    sums[4 * i] += __uint_as_float(v.x), sums[4 * i + 1] += __uint_as_float(v.y);
    sums[4 * i + 2] += __uint_as_float(v.z), sums[4 * i + 3] += __uint_as_float(v.w);
  };
  constexpr int AT_ONCE = CLUSTER || TEAM == 1 ? 2 : TEAM - 1;  // registers are scarce, L2 is far
#pragma unroll
  for (int s = 0; s < TEAM - 1; s += AT_ONCE) {
    uint4 v[AT_ONCE][PART / 4];
#pragma unroll
    for (int k = 0; k < AT_ONCE * PART / 4; k++) {
      const int from = s + k / (PART / 4), i = k % (PART / 4);
      if (from < TEAM - 1) v[k / (PART / 4)][i] = CLUSTER ? come[from * SENT + i * THREADS] : peek_word(come + from * SENT + i * THREADS);
    }
    // Those that are not there yet are asked for again, all at once.
#ifdef GUARD
    const i64 since = clock64();
#endif
    for (bool again = TAGGED && !CLUSTER; again;) {
      again = false;
#ifdef GUARD
      if (clock64() - since > (1ll << 22)) break;
#endif
#pragma unroll
      for (int k = 0; k < AT_ONCE * PART / 4; k++) {
        const int from = s + k / (PART / 4), i = k % (PART / 4);
        if (from < TEAM - 1 && !of_step(v[k / (PART / 4)][i], times)) {
          v[k / (PART / 4)][i] = peek_word(come + from * SENT + i * THREADS);
          again = true;
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < AT_ONCE * PART / 4; k++)
      if (s + k / (PART / 4) < TEAM - 1) add(k % (PART / 4), v[k / (PART / 4)][k % (PART / 4)]);
  }
}

// After the last step: until then the others may write to this block's shared memory.
__device__ __forceinline__ void end_team() {
  if (CLUSTER) meet_cluster();
}
