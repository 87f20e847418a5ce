// Kernels that begin while the one before them ends (programmatic dependent launch, sm_90 and
// later; decision 0022).
#pragma once

#include <warploom/device/qualifiers.cuh>

namespace warploom {

// Every thread of a kernel whose launch overlaps (`LaunchShape.overlaps`; prefetches do not) comes
// here before it reads or writes global memory: returns when all kernels before it in the stream
// are done and what they wrote can be seen. The next kernel may take SMs from now on as they fall
// idle; it waits here in turn. What the compiler may move above this, loads of memory that it takes
// for constant, a test looks for in the machine code.
WL_FN void await_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace warploom
