// The compiled copy kernels, written at build time by embed.py.
#pragma once

#include <cstddef>

namespace kvdock::cuda {

extern const char kKernelTargets[];  // "sm_80,sm_90,…"; "" when this build has none
extern const size_t kKernelImageBytes;
extern const unsigned char kKernelImage[];

}  // namespace kvdock::cuda
