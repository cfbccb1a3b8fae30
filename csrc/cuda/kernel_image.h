// The compiled copy kernels, written at build time by embed.py.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace kvdock::cuda {

extern const std::vector<std::string> kKernelTargets;  // "sm_90", "compute_80", …; empty in a build without nvcc
extern const size_t kKernelImageBytes;
extern const unsigned char kKernelImage[];

}  // namespace kvdock::cuda
