// Memory in which arrays are placed one behind the other. Arrays of the widest numbers come first,
// so that each array is aligned.
#pragma once

namespace warploom {

class Memory {
 public:
  WL_FN explicit Memory(char* begin) : end_(begin) {}

  template <class T>
  WL_FN void take(T*& array, long long count) {
    array = reinterpret_cast<T*>(end_);
    end_ += count * sizeof(T);
  }

  // The end of the arrays, aligned for 64-bit numbers.
  WL_FN char* end() const { return end_ + (reinterpret_cast<unsigned long long>(end_) & 4); }

 private:
  char* end_;
};

}  // namespace warploom
