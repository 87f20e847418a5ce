// Stands in for the device's header of that name, which is PTX for the most part.
#pragma once

#include <warploom/variant.cuh>

namespace warploom {

inline float to_float(e5m2_t value) {
  return to_float(half_t{static_cast<unsigned short>(value.bits << 8)});
}
inline float to_float(e4m3_t value) {
  const unsigned magnitude = value.bits & 0x7fu, sign = (value.bits & 0x80u) << 8;
  const unsigned bits = magnitude == 0x7fu ? 0x7e00u : magnitude << 7 | sign;
  return 256.0f * to_float(half_t{static_cast<unsigned short>(bits)});
}

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
