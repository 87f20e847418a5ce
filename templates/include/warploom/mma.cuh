// The two products of attention on tensor cores, for one warp: 16x8x16 MMA with fp32 accumulation,
// operands read by ldmatrix from swizzled tiles.
//
// An accumulator block c[4] of 16 rows x 8 columns holds, in lane l, rows l / 4 (c[0], c[1]) and l
// / 4 + 8 (c[2], c[3]) at columns 2 * (l % 4) and the next.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include <warploom/ptx.cuh>
#include <warploom/tile.cuh>
#include <warploom/widen.cuh>

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

// 8-bit keys: ldmatrix gives a thread four neighbouring lanes of a key, where the product wants two
// and two, 8 lanes apart. The sum over lanes has no order: queries are read in that permutation,
// too. 8-bit values: it gives two neighbouring lanes of two keys; the first lanes make one
// block of 8 columns, the second the next, and outputs are stored in that permutation.
template <class K>
struct WarpMma {
  using S = Sizes<K>;
  using O = Operands<K>;
  using Element = typename K::Config::Element;
  using KvElement = typename K::Config::KvElement;
  // Weights up to 256 and 8-bit values are exact enough in half precision, and widen for less.
  static constexpr bool kHalfValues =
      O::kNarrowValues && K::Variant::kSoftmax && !O::kScalesWeights;
  using Atom = MmaAtom<Element>;
  using ValueElement = cute::conditional_t<kHalfValues, half_t, Element>;
  static constexpr bool kHalfKeys =
      O::kNarrowKeys && S::kSplitKeys && S::kDimQk <= 128 && !cute::is_same_v<Element, half_t>;
  using KeyElement = cute::conditional_t<kHalfKeys, half_t, Element>;
  using ScoreAtom = MmaAtom<KeyElement>;
  using ValueAtom = MmaAtom<ValueElement>;

  static constexpr int kRowBlocks = S::kRowBlocks;
  static constexpr int kKeyBlocks = S::kKeyBlocks;
  static constexpr int kLaneBlocks = S::kDimV / 8;

  using Scores = float[kRowBlocks][kKeyBlocks][4];
  using Output = float[kRowBlocks][kLaneBlocks][4];
  using QueryReader = BlockReader<QueryTile<K>, S::kBlock>;
  using Keys = BlockReader<typename O::Keys, O::kKeyBlock>;
  using Values = BlockReader<typename O::Values, O::kValueBlock>;

  WL_FN static unsigned lane() { return threadIdx.x % kWarpSize; }
  // First row of the warp's block b.
  WL_FN static int block_row(int b) {
    const unsigned warp = S::kSplitKeys ? 0 : threadIdx.x / kWarpSize;
    return 16 * (warp + S::kRowWarps * b);
  }
  // First column of the output that this thread holds: its own of a block of 8, or of two blocks.
  WL_FN static int first_column() { return lane() % 4 * (O::kNarrowValues ? 4 : 2); }

  // The rows of queries of a warp, read from shared memory for each tile of keys. Few rows of
  // bfloat16 that meet 8-bit keys become half precision, and stay in registers: these keys widen to
  // it for a quarter of the instructions. A power of two for each row keeps all that bfloat16
  // holds, down to 2^-31 of the row's largest number.
  class Queries {
   public:
    WL_FN explicit Queries(const Element* staged) : reader_(reader(staged)) {
      if constexpr (kHalfKeys) hold();
    }
    // 16 lanes of block m.
    WL_FN void read(int m, int k, unsigned (&a)[4]) const {
      if constexpr (kHalfKeys) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = held_[k / 16][i];
      } else {
        load(m, k, a);
      }
    }
    WL_FN void rescale(Scores& scores) const {
#pragma unroll
      for (int n = 0; kHalfKeys && n < kKeyBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[0][n][i] *= unscale_[i / 2];
      }
    }

   private:
    WL_FN static QueryReader reader(const Element* staged) {
      if constexpr (O::kNarrowKeys) return {staged, block_row(0) + lane() / 4, lane() % 4 * 4};
      return {staged, block_row(0) + lane() % 16, lane() / 16 * kVector};
    }
    WL_FN void load(int m, int k, unsigned (&a)[4]) const {
      const int row = 16 * S::kRowWarps * m;
      if constexpr (O::kNarrowKeys) {
        const uint2 low = reader_.template block<uint2>(row, k);
        const uint2 high = reader_.template block<uint2>(row + 8, k);
        a[0] = low.x, a[1] = high.x, a[2] = low.y, a[3] = high.y;
      } else {
        cute::SM75_U32x4_LDSM_N::copy(reader_.block(row, k), a[0], a[1], a[2], a[3]);
      }
    }
    WL_FN void hold() {
      int largest[2] = {};
#pragma unroll
      for (int k = 0; k < S::kDimQk; k += 16) {
        load(0, k, held_[k / 16]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // the bits of a number without its sign are in its order
          const unsigned bits = held_[k / 16][i] & 0x7fff7fffu;
          largest[i % 2] = max(largest[i % 2], max(int(bits >> 16), int(bits & 0xffffu)));
        }
      }
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        largest[r] = max(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 1));
        largest[r] = max(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 2));
        // The largest goes to [2^14, 2^15); what is not finite, and 0, stays.
        const int exponent = largest[r] >> 7;
        const int shift = exponent == 255 ? 0 : min(127 + 14 - exponent, 100);
        scale[r] = __int_as_float((127 + shift) << 23);
        unscale_[r] = __int_as_float((127 - shift) << 23);
      }
#pragma unroll
      for (int k = 0; k < S::kDimQk / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          held_[k][i] = pack(half_t{}, __uint_as_float(held_[k][i] << 16) * scale[i % 2],
                             __uint_as_float(held_[k][i] & 0xffff0000u) * scale[i % 2]);
        }
      }
    }

    QueryReader reader_;
    unsigned held_[kHalfKeys ? S::kDimQk / 16 : 1][4];
    float unscale_[2];  // of rows l / 4 and l / 4 + 8
  };

  template <class T>
  WL_FN static Keys key_reader(const T* staged) {
    return {staged, lane() / 16 * 8 + lane() % 8, lane() / 8 % 2 * kVector};
  }
  template <class T>
  WL_FN static Values value_reader(const T* staged) {
    return {staged, lane() % 16, lane() / 16 * kVector};
  }

  // scores = Q K^T
  WL_FN static void scores(const Queries& queries, const Keys& keys, Scores& scores) {
    constexpr int kSteps = O::kNarrowKeys ? 2 : 1;  // of 16 lanes, with one ldmatrix of keys
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < S::kDimQk; k += 16 * kSteps) {
      unsigned a[kSteps][kRowBlocks][4];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) queries.read(m, k + 16 * s, a[s][m]);
      }
#pragma unroll
      for (int n = 0; n < kKeyBlocks; n += 2) {
        unsigned b[kSteps][4];
        read_keys(keys, n, k, b);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int m = 0; m < kRowBlocks; ++m) {
            multiply<ScoreAtom>(scores[m][n], a[s][m], b[s][0], b[s][1]);
            multiply<ScoreAtom>(scores[m][n + 1], a[s][m], b[s][2], b[s][3]);
          }
        }
      }
    }
  }

  // output += P V, where P is weight(row r of this thread, key of the tile, logit). Two
  // neighbouring 8-column blocks in accumulator layout, rounded to 16 bits, are the left operand of
  // one step of 16 keys. Weights are worked out step by step: registers of their logits become
  // free, and exponentials overlap with the products of the step before.
  template <class P>
  WL_FN static void accumulate(const Scores& logits, const Values& values, P&& weight,
                               Output& output) {
    constexpr int kSteps = O::kNarrowValues ? 2 : 1;  // of 16 columns, with one ldmatrix
#pragma unroll
    for (int n = 0; n < kKeyBlocks; n += 2) {
      unsigned a[kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = 2 * m + i % 2, key = 8 * (n + i / 2) + lane() % 4 * 2;
          const float* pair = &logits[m][n + i / 2][i % 2 * 2];
          const float low = weight(r, key, pair[0]), high = weight(r, key + 1, pair[1]);
          a[m][i] = pack(ValueElement{}, low, high);
        }
      }
#pragma unroll
      for (int l = 0; l < kLaneBlocks; l += 2 * kSteps) {
        unsigned b[kSteps][4];
        read_values(values, n, l, b);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int m = 0; m < kRowBlocks; ++m) {
            multiply<ValueAtom>(output[m][l + 2 * s], a[m], b[s][0], b[s][1]);
            multiply<ValueAtom>(output[m][l + 2 * s + 1], a[m], b[s][2], b[s][3]);
          }
        }
      }
    }
  }

 private:
  // Lanes k .. of keys 8 * n .. 8 * n + 15.
  template <int kSteps>
  WL_FN static void read_keys(const Keys& keys, int n, int k, unsigned (&b)[kSteps][4]) {
    if constexpr (O::kNarrowKeys) {
      unsigned bytes[4];
      cute::SM75_U32x4_LDSM_N::copy(keys.block(8 * n, k / 2), bytes[0], bytes[1], bytes[2],
                                    bytes[3]);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        widen<KvElement>(bytes[s], KeyElement{}, b[s][0], b[s][1]);
        widen<KvElement>(bytes[s + 2], KeyElement{}, b[s][2], b[s][3]);
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
        const unsigned first = __byte_perm(bytes[2 * s], 0, 0x3120);
        const unsigned second = __byte_perm(bytes[2 * s + 1], 0, 0x3120);
        widen<KvElement>(first, ValueElement{}, b[s][0], b[s][2]);
        widen<KvElement>(second, ValueElement{}, b[s][1], b[s][3]);
      }
    } else {
      cute::SM75_U16x8_LDSM_T::copy(values.block(8 * n, 8 * l), b[0][0], b[0][1], b[0][2], b[0][3]);
    }
  }
  template <class Atom>
  WL_FN static void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Atom::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
  }
};

}  // namespace warploom
