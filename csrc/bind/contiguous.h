// The bytes of any Python object that exports them in a row, whatever its element type.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace kvdock {

class Contiguous {
 public:
  explicit Contiguous(const pybind11::buffer& of, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(of.ptr(), &view_, flags) != 0) throw pybind11::error_already_set();
  }
  ~Contiguous() { PyBuffer_Release(&view_); }
  Contiguous(const Contiguous&) = delete;
  Contiguous& operator=(const Contiguous&) = delete;

  char* data() const { return static_cast<char*>(view_.buf); }
  size_t bytes() const { return size_t(view_.len); }

 private:
  Py_buffer view_;
};

}  // namespace kvdock
