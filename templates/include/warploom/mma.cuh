// The two products of attention on tensor cores, for one warp: 16x8x16 MMA with fp32 accumulation,
// operands read by ldmatrix from swizzled tiles.
//
// An accumulator block c[4] of 16 rows x 8 columns holds, in lane l, rows l / 4 (c[0], c[1]) and l
// / 4 + 8 (c[2], c[3]) at columns 2 * (l % 4) and the next.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include <warploom/tile.cuh>

namespace warploom {

template <class Element>
struct MmaAtom;
template <>
struct MmaAtom<half_t> : cute::SM80_16x8x16_F32F16F16F32_TN {
  WL_FN static unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
};
template <>
struct MmaAtom<bfloat16_t> : cute::SM80_16x8x16_F32BF16BF16F32_TN {
  WL_FN static unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
};

// A lane's place in a staged tile, from which it reads 16x16 blocks: swizzling is worked out once.
// Rows 8 apart are permuted alike, and the vectors of a row by exclusive or, so that moving by
// blocks of rows adds a constant, and moving by 16 lanes flips bits.
template <class Tile, int kBlock>
struct BlockReader {
  const char* tile;
  int at;  // byte offset of this lane's vector in block (0, 0)

  template <class Element>
  WL_FN BlockReader(const Element* staged, unsigned row, unsigned vector)
      : tile(reinterpret_cast<const char*>(staged)),
        at(2 * Tile::offset(int(row), int(kVector * vector))) {}

  WL_FN const cute::uint128_t& block(int row, int lane) const {
    const char* flipped = tile + (at ^ (lane % kBlock * 2));
    const int distance = lane / kBlock * Tile::kPanelBytes + row * kBlock * 2;
    return *reinterpret_cast<const cute::uint128_t*>(flipped + distance);
  }
};

template <class K>
struct WarpMma {
  using S = Sizes<K>;
  using Atom = MmaAtom<typename K::Config::Element>;

  static constexpr int kRowBlocks = S::kRowBlocks;
  static constexpr int kKeyBlocks = S::kKeyBlocks;
  static constexpr int kLaneBlocks = S::kDimV / 8;

  using Scores = float[kRowBlocks][kKeyBlocks][4];
  using Output = float[kRowBlocks][kLaneBlocks][4];
  using Queries = BlockReader<QueryTile<K>, S::kBlock>;
  using Keys = BlockReader<KeyTile<K>, S::kBlock>;
  using Values = BlockReader<ValueTile<K>, S::kBlock>;

  WL_FN static unsigned lane() { return threadIdx.x % kWarpSize; }
  // First row of the warp's block b.
  WL_FN static int block_row(int b) {
    const unsigned warp = S::kSplitKeys ? 0 : threadIdx.x / kWarpSize;
    return 16 * (warp + S::kRowWarps * b);
  }

  template <class Element>
  WL_FN static Queries query_reader(const Element* staged) {
    return {staged, block_row(0) + lane() % 16, lane() / 16};
  }
  template <class Element>
  WL_FN static Keys key_reader(const Element* staged) {
    return {staged, lane() / 16 * 8 + lane() % 8, lane() / 8 % 2};
  }
  template <class Element>
  WL_FN static Values value_reader(const Element* staged) {
    return {staged, lane() % 16, lane() / 16};
  }

  // scores = Q K^T
  WL_FN static void scores(const Queries& queries, const Keys& keys, Scores& scores) {
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < S::kDimQk; k += 16) {
      unsigned a[kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        cute::SM75_U32x4_LDSM_N::copy(queries.block(16 * S::kRowWarps * m, k), a[m][0], a[m][1],
                                      a[m][2], a[m][3]);
      }
#pragma unroll
      for (int n = 0; n < kKeyBlocks; n += 2) {
        unsigned b[4];
        cute::SM75_U32x4_LDSM_N::copy(keys.block(8 * n, k), b[0], b[1], b[2], b[3]);
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          multiply(scores[m][n], a[m], b[0], b[1]);
          multiply(scores[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // output += P V, where P(row r of this thread, logit) is a probability. Two neighbouring 8-column
  // blocks in accumulator layout, rounded to 16 bits, are the left operand of one step of 16 keys.
  // Probabilities are worked out step by step: registers of their logits become free, and
  // exponentials overlap with the products of the step before.
  template <class P>
  WL_FN static void accumulate(const Scores& logits, const Values& values, P&& probability,
                               Output& output) {
#pragma unroll
    for (int n = 0; n < kKeyBlocks; n += 2) {
      unsigned a[kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = 2 * m + i % 2;
          const float* pair = &logits[m][n + i / 2][i % 2 * 2];
          const float low = probability(r, pair[0]), high = probability(r, pair[1]);
          a[m][i] = Atom::pack(low, high);
        }
      }
#pragma unroll
      for (int l = 0; l < kLaneBlocks; l += 2) {
        unsigned b[4];
        cute::SM75_U16x8_LDSM_T::copy(values.block(8 * n, 8 * l), b[0], b[1], b[2], b[3]);
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          multiply(output[m][l], a[m], b[0], b[1]);
          multiply(output[m][l + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

 private:
  WL_FN static void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Atom::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
  }
};

}  // namespace warploom
