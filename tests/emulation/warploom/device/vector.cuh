// Stands in for the device's header of that name, which is PTX for the most part.
#pragma once

#include <warploom/device/widen.cuh>

namespace warploom {

inline void load_once(long long from, bool exists, uint4& words) {
  if (exists) std::memcpy(&words, reinterpret_cast<const void*>(from), sizeof(words));
}

template <class Element>
void unpack(const uint4& words, Element, float* numbers) {
  Element elements[16 / sizeof(Element)];
  std::memcpy(elements, &words, sizeof(words));
  for (const Element& element : elements) *numbers++ = to_float(element);
}

}  // namespace warploom
