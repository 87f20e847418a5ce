// Memory that arrays take one behind the other; those of the widest numbers first, so that each is
// aligned.
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

  // Where 64-bit numbers may follow.
  WL_FN char* end() const { return end_ + (reinterpret_cast<unsigned long long>(end_) & 4); }

 private:
  char* end_;
};

}  // namespace warploom
