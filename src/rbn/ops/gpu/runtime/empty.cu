// An empty kernel for occupancy queries: how many blocks or clusters fit on the GPU.
extern "C" __global__ void empty() {}
