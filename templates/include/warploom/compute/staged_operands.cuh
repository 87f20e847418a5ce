// What the tensor cores are fed with, read by ldmatrix from swizzled tiles: 16 keys by 16 lanes at
// a time, of 8-bit ones 32.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include <warploom/compute/fragments.cuh>
#include <warploom/device/ptx.cuh>
#include <warploom/device/widen.cuh>

namespace warploom {

template <class Element>
struct MmaAtom;
template <>
struct MmaAtom<half_t> : cute::SM80_16x8x16_F32F16F16F32_TN {};
template <>
struct MmaAtom<bfloat16_t> : cute::SM80_16x8x16_F32BF16BF16F32_TN {};

// A lane's place in a staged tile, from which it reads 16x16 blocks: swizzling is worked out once.
// Rows 8 apart are permuted alike, and the vectors of a row by exclusive or, so that moving by
// blocks of rows adds a constant, and moving by 16 lanes flips bits. Lanes count halfwords.
template <class Tile, int kBlock>
struct BlockReader {
  const char* tile;
  int at;  // byte offset of this lane's place in block (0, 0)

  template <class Element>
  WL_FN BlockReader(const Element* staged, unsigned row, unsigned lane)
      : tile(reinterpret_cast<const char*>(staged)), at(2 * Tile::offset(int(row), int(lane))) {}

  template <class Words = cute::uint128_t>
  WL_FN const Words& block(int row, int lane) const {
    const char* flipped = tile + (at ^ (lane % kBlock * 2));
    const int distance = lane / kBlock * Tile::kPanelBytes + row * kBlock * 2;
    return *reinterpret_cast<const Words*>(flipped + distance);
  }
};

// A power of two that brings the largest number of a row of bfloat16 to [2^14, 2^15), where half
// precision holds most of it, and its inverse. What is not finite, and 0, stays. `largest` has the
// bits of the largest number that this thread holds, without its sign: four neighbours share a row.
struct HalfScale {
  float scale, inverse;
  WL_FN explicit HalfScale(int largest) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    const int exponent = largest >> 7;
    const int shift = exponent == 255 ? 0 : min(127 + 14 - exponent, 100);
    scale = __int_as_float((127 + shift) << 23);
    inverse = __int_as_float((127 - shift) << 23);
  }
};
// The larger of a number's bits and those of two packed numbers, without signs: they are in order.
WL_FN int larger_bits(int largest, unsigned packed) {
  const unsigned bits = packed & 0x7fff7fffu;
  return max(largest, max(int(bits >> 16), int(bits & 0xffffu)));
}
// Two packed numbers of bfloat16, scaled, in half precision.
WL_FN unsigned to_half(unsigned packed, float scale) {
  return pack(half_t{}, __uint_as_float(packed << 16) * scale,
              __uint_as_float(packed & 0xffff0000u) * scale);
}

// 8-bit keys: ldmatrix gives a thread four neighbouring lanes of a key, where the product wants two
// and two, 8 lanes apart. The sum over lanes has no order: queries are read in that permutation,
// too. 8-bit values: it gives two neighbouring lanes of two keys; the first lanes make one
// block of 8 columns, the second the next, and outputs are stored in that permutation.
template <class K>
struct StagedOperands {
  using S = Sizes<K>;
  using O = Operands<K>;
  using Element = typename K::Config::Element;
  using KvElement = typename K::Config::KvElement;
  using Atom = MmaAtom<Element>;
  using ValueElement = cute::conditional_t<O::kHalfValues, half_t, Element>;
  static constexpr bool kHalfKeys =
      O::kNarrowKeys && S::kSplitKeys && S::kDimQk <= 128 && !cute::is_same_v<Element, half_t>;
  using KeyElement = cute::conditional_t<kHalfKeys, half_t, Element>;
  using ScoreAtom = MmaAtom<KeyElement>;
  using ValueAtom = MmaAtom<ValueElement>;

  using QueryReader = BlockReader<QueryTile<K>, S::kBlock>;
  using Keys = BlockReader<typename O::Keys, O::kKeyBlock>;
  using Values = BlockReader<typename O::Values, O::kValueBlock>;

  // An operand is four blocks of 8 x 8. Along what is summed over, the one after the first comes
  // third in a left operand, of 16 x 16, and second in two right ones, of 8 columns each; across
  // that it is the other way round.
  static constexpr bool kLeft = S::kTurned;
  static constexpr int kAlong = kLeft ? 2 : 1, kAcross = 3 - kAlong;

  template <class T>
  WL_FN static Keys key_reader(const T* staged) {
    return reader<Keys, !kLeft>(staged);
  }
  template <class T>
  WL_FN static Values value_reader(const T* staged) {
    return reader<Values, kLeft>(staged);
  }

  // Lanes k .. of keys 8 * n .. 8 * n + 15.
  template <int kSteps>
  WL_FN static void read_keys(const Keys& keys, int n, int k, unsigned (&b)[kSteps][4]) {
    if constexpr (O::kNarrowKeys) {
      unsigned bytes[4];
      cute::SM75_U32x4_LDSM_N::copy(keys.block(8 * n, k / 2), bytes[0], bytes[1], bytes[2],
                                    bytes[3]);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        widen<KvElement>(bytes[s * kAlong], KeyElement{}, b[s][0], b[s][kAlong]);
        widen<KvElement>(bytes[s * kAlong + kAcross], KeyElement{}, b[s][kAcross], b[s][3]);
      }
    } else {
      cute::SM75_U32x4_LDSM_N::copy(keys.block(8 * n, k), b[0][0], b[0][1], b[0][2], b[0][3]);
    }
  }
  // Columns 8 * l .. of keys 8 * n .. 8 * n + 15.
  template <int kSteps>
  WL_FN static void read_values(const Values& values, int n, int l, unsigned (&b)[kSteps][4]) {
    if constexpr (O::kNarrowValues) {
      unsigned bytes[4];
      cute::SM75_U16x8_LDSM_T::copy(values.block(8 * n, 4 * l), bytes[0], bytes[1], bytes[2],
                                    bytes[3]);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const unsigned first = __byte_perm(bytes[s * kAcross], 0, 0x3120);
        const unsigned second = __byte_perm(bytes[s * kAcross + kAlong], 0, 0x3120);
        widen<KvElement>(first, ValueElement{}, b[s][0], b[s][kAcross]);
        widen<KvElement>(second, ValueElement{}, b[s][kAlong], b[s][3]);
      }
    } else {
      cute::SM75_U16x8_LDSM_T::copy(values.block(8 * n, 8 * l), b[0][0], b[0][1], b[0][2], b[0][3]);
    }
  }
  template <class Atom>
  WL_FN static void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Atom::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
  }

 private:
  // A lane names a row of one of four blocks of 8 x 8, of which the second lies beside the first or
  // below it.
  template <class Reader, bool kBeside, class T>
  WL_FN static Reader reader(const T* staged) {
    const unsigned lane = threadIdx.x % kWarpSize;
    const unsigned row = kBeside ? lane / 16 * 8 + lane % 8 : lane % 16;
    return {staged, row, (kBeside ? lane / 8 % 2 : lane / 16) * kVector};
  }
};

}  // namespace warploom
