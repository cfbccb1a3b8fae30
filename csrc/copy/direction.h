// Which way a copy goes. In a file of its own because nvcc compiles it too: nothing newer than C++17.
#pragma once

namespace kvdock {

enum class Direction { gather, scatter };  // paged blocks -> slots; slots -> paged blocks

}  // namespace kvdock
