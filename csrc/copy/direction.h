// The direction of a copy. It has a file of its own, because nvcc compiles it, too, as C++17.
#pragma once

namespace kvdock {

enum class Direction { gather, scatter };  // paged blocks -> slots; slots -> paged blocks

}  // namespace kvdock
