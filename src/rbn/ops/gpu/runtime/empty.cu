// To ask the card how many blocks, or clusters of them, it has room for.
extern "C" __global__ void empty() {}
