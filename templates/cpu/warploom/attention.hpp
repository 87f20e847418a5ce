// One work item: FlashAttention-2 over the item's keys, for the rows of one query tile.
#pragma once

#include <warploom/dot_bf16.hpp>
#include <warploom/dot_fp32.hpp>
#include <warploom/output.hpp>
#include <warploom/pack.hpp>
#include <warploom/softmax.hpp>

namespace warploom {

// bfloat16 dot products take tensors as they are stored. What a transform made stays in float32.
#if defined(WL_HAS_DOT_BF16)
template <class Element, bool kAsStored>
using DotOf =
    std::conditional_t<kAsStored && std::is_same_v<Element, bfloat16_t>, DotBf16, DotFp32>;
#else
template <class Element, bool kAsStored>
using DotOf = DotFp32;
#endif

// Sizes and types that follow from a kernel's configuration.
template <class K>
struct Shape {
  using Config = typename K::Config;
  using Variant = typename K::Variant;
  using Element = typename Config::Element;
  using Scores = DotOf<Element, !Variant::kHasQueryTransform && !Variant::kHasKeyTransform>;
  using Outputs = DotOf<Element, !Variant::kHasValueTransform>;

  static constexpr int kRows = Config::kRows;
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kBlock = 4 * kMicroRows;  // rows that share a pass over a tile of keys
  static constexpr int kChunk = 2 * kLanes;      // keys are padded to it
  static constexpr int kScoreSteps = Config::kHeadDimQk / Scores::kPerWord;
  static constexpr int kOutputSteps = kKeys / Outputs::kPerWord;
  static constexpr int kKeyPanels = ceil_div(kKeys, kPanel);
  static constexpr int kKeyPanelSize = kScoreSteps * kPanel;
  static constexpr int kValueVectors = ceil_div(Config::kHeadDimV, kLanes);
  static constexpr int kValuePanels = ceil_div(kValueVectors, kMicroVectors);
  static constexpr int kValuePanelSize = kOutputSteps * kPanel;
  static constexpr int kValueTail = kValueVectors - (kValuePanels - 1) * kMicroVectors;
  static constexpr int kLogitStride = kKeyPanels * kPanel;
  static constexpr int kOutStride = kValueVectors * kLanes;
  static constexpr int kStaged = Variant::kHasKeyTransform || Variant::kHasValueTransform ? kKeys : 1;
  static constexpr int kStagedDim = max_int(Config::kHeadDimQk, Config::kHeadDimV);
  static_assert(kKeys % kChunk == 0, "tiles of keys are whole chunks");
};

// Memory of one thread, kept over its items.
template <class K>
struct alignas(64) Scratch {
  using S = Shape<K>;
  typename S::Scores::Word query[S::kRows * S::kScoreSteps];
  alignas(64) typename S::Scores::Word keys[S::kKeyPanels * S::kKeyPanelSize];
  alignas(64) typename S::Outputs::Word values[S::kValuePanels * S::kValuePanelSize];
  alignas(64) float logits[S::kBlock * S::kLogitStride];
  alignas(64) typename S::Outputs::Word weights[S::kBlock * S::kOutputSteps];
  alignas(64) float out[S::kRows * S::kOutStride];
  alignas(64) float staged[S::kStaged * S::kStagedDim];
  Running running[S::kRows];
  KeyTile<K> tile;
};

template <class K>
class Attention {
  using S = Shape<K>;
  using Config = typename K::Config;
  using Variant = typename K::Variant;
  using Element = typename Config::Element;
  using Scores = typename S::Scores;
  using Outputs = typename S::Outputs;

 public:
  Attention(const Item<K>& item, Scratch<K>& scratch) : item_(item), m_(scratch), tile_(m_.tile) {}

  void run() {
    load_queries();
    std::memset(m_.out, 0, sizeof(float) * item_.rows * S::kOutStride);
    for (int r = 0; r < item_.rows; ++r) m_.running[r] = Running();
    for (int key = item_.work.kv_begin; key < item_.work.kv_end; key += Config::kKeys) {
      tile_.gather(item_, key, min_int(Config::kKeys, item_.work.kv_end - key));
      if (classify(0, item_.rows) != TileClass::kSkip) run_tile();
    }
    finish();
  }

 private:
  void load_queries() {
    const Element* q = static_cast<const Element*>(item_.p.q);
    for (int r = 0; r < item_.rows; ++r) {
      const Element* row = q + item_.q_offset(r);
      auto* out = m_.query + r * S::kScoreSteps;
      if constexpr (Variant::kHasQueryTransform) {
        alignas(64) float x[S::kStagedDim + kLanes];
        widen_row<Config::kHeadDimQk>(row, x);
        transform<QuerySeat<Variant>, Config::kHeadDimQk>(item_.p, item_.tile, x, out,
                                                          item_.row[r]);
      } else if constexpr (Scores::kPerWord == 2) {
        std::memcpy(out, row, Config::kHeadDimQk * sizeof(Element));
      } else {
        widen_row<Config::kHeadDimQk>(row, out);
      }
    }
  }

  template <int kDim>
  static void widen_row(const Element* row, float* out) {
    for (int lane = 0; lane < kDim; lane += kLanes) {
      const int count = min_int(kLanes, kDim - lane);
      const Vec v = load_floats(row + lane, count);
      std::memcpy(out + lane, &v, sizeof(float) * count);
    }
  }

  TileClass classify(int begin, int end) const {
    if (tile_.kv_pos.begin >= tile_.kv_pos.end) return TileClass::kSkip;
    const TileClass c = Variant::classify(item_.p, item_.tile, item_.q_pos(begin, end),
                                          tile_.kv_pos, item_.q_head(begin, end));
    return c == TileClass::kFull && tile_.has_holes ? TileClass::kPartial : c;
  }

  void run_tile() {
    const int padded = round_up(tile_.count, S::kChunk);
    pack_keys(padded);
    pack_values(padded);
    tile_.hoist(item_);
    for (int begin = 0; begin < item_.rows; begin += S::kBlock) {
      run_block(begin, min_int(S::kBlock, item_.rows - begin), padded);
    }
  }

  void pack_keys(int padded) {
    constexpr int kDim = Config::kHeadDimQk;
    if constexpr (Variant::kHasKeyTransform) {
      const float* rows[Config::kKeys];
      stage<KeySeat<Variant>, kDim>(tile_.key, rows);
      pack_transposed<Scores, kDim>(rows, padded, m_.keys);
    } else {
      pack_transposed<Scores, kDim>(tile_.key, padded, m_.keys);
    }
  }

  void pack_values(int padded) {
    constexpr int kDim = Config::kHeadDimV;
    if constexpr (Variant::kHasValueTransform) {
      const float* rows[Config::kKeys];
      stage<ValueSeat<Variant>, kDim>(tile_.value, rows);
      pack_rows<Outputs, kDim>(rows, padded, m_.values, S::kValuePanelSize);
    } else {
      pack_rows<Outputs, kDim>(tile_.value, padded, m_.values, S::kValuePanelSize);
    }
  }

  // Transformed rows of keys or values; rows that do not exist stay zero.
  template <class Seat, int kDim>
  void stage(const Element* const* stored, const float** rows) {
    for (int j = 0; j < Config::kKeys; ++j) {
      rows[j] = kZeroRow<float>;
      if (stored[j] == kZeroRow<Element>) continue;
      alignas(64) float x[S::kStagedDim + kLanes];
      widen_row<kDim>(stored[j], x);
      transform<Seat, kDim>(item_.p, item_.tile, x, m_.staged + j * kDim, tile_.position(j));
      rows[j] = m_.staged + j * kDim;
    }
  }

  void run_block(int first, int rows, int padded) {
    const TileClass c = classify(first, first + rows);
    if (c == TileClass::kSkip) return;
    Range keys = c == TileClass::kFull ? Range{0, padded} : visible(first, rows, padded);
    if (keys.begin >= keys.end) return;
    const float scale = product_scale<Variant>(item_.p.sm_scale);
    const Panels<Scores, kMicroVectors> k{m_.keys, S::kKeyPanelSize, keys.begin / kPanel,
                                          ceil_div(keys.end, kPanel), S::kKeyPanels};
    matmul({m_.query + first * S::kScoreSteps, S::kScoreSteps, rows}, k, S::kScoreSteps,
           [&](int row, int column, Vec sum) WL_LAMBDA_INLINE {
             store_vec(m_.logits + row * S::kLogitStride + column, sum * scale);
           });
    float rescale[S::kBlock];
    for (int row = 0; row < rows; ++row) {
      rescale[row] = weigh(first + row, row, keys, c == TileClass::kPartial);
    }
    add_values(first, rows, keys, rescale);
  }

  // Keys of the tile that rows of a block may see, in whole chunks.
  Range visible(int first, int rows, int padded) const {
    if constexpr (Config::kColumnPositions) return {0, padded};
    const Range b = Variant::kv_bounds(item_.p, item_.tile, item_.q_pos(first, first + rows),
                                       item_.q_head(first, first + rows));
    const int begin = max_int(0, b.begin - tile_.first_pos);
    const int end = min_int(padded, b.end - tile_.first_pos);
    return {begin / S::kChunk * S::kChunk, round_up(end, S::kChunk)};
  }

  // Logits of one row to weights; returns the factor of the row's output so far.
  float weigh(int r, int row, Range keys, bool masked) {
    float* s = m_.logits + row * S::kLogitStride;
    auto* weights = m_.weights + row * S::kOutputSteps;
    const int end = min_int(keys.end, tile_.count);
    if (Variant::kHasLogitsMask || Config::kColumnPositions ? masked : false) {
      apply_logits<K, true>(item_, tile_, r, keys.begin, end, s);
    } else if constexpr (Variant::kHasLogitsTransform) {
      apply_logits<K, false>(item_, tile_, r, keys.begin, end, s);
    }
    for (int j = end; j < keys.end; ++j) s[j] = kMasked<Variant>;
    if constexpr (Variant::kSoftmax) {
      return softmax_row<Outputs>(s, keys.begin, keys.end, weights, m_.running[r]);
    } else {
      copy_row<Outputs>(s, keys.begin, keys.end, weights);
      return 1.0f;
    }
  }

  void add_values(int first, int rows, Range keys, const float* rescale) {
    constexpr int kPerWord = Outputs::kPerWord;
    float* out = m_.out + first * S::kOutStride;
    const int skipped = keys.begin / kPerWord;
    const Panels<Outputs, S::kValueTail> v{m_.values + skipped * kPanel, S::kValuePanelSize, 0,
                                           S::kValuePanels, S::kValuePanels - 1};
    matmul({m_.weights + skipped, S::kOutputSteps, rows}, v, (keys.end - keys.begin) / kPerWord,
           [&](int row, int column, Vec sum) WL_LAMBDA_INLINE {
             float* at = out + row * S::kOutStride + column;
             store_vec(at, sum + rescale[row] * load_vec(at));
           });
  }

  void finish() {
    RowResult<K> result;
    for (int r = 0; r < item_.rows; ++r) {
      const float max = m_.running[r].max[0];
      const float sum = sum_lanes(m_.running[r].sum)[0];
      float inverse = 1.0f;
      if constexpr (Variant::kSoftmax) inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
      for (int lane = 0; lane < S::kOutStride; lane += kLanes) {
        store_vec(result.o + lane, load_vec(m_.out + r * S::kOutStride + lane) * inverse);
      }
      result.lse = Variant::kSoftmax ? max + __builtin_log2f(sum) : 0.0f;
      if (item_.work.slot < 0) {
        write_output(item_, r, result);
      } else {
        write_partial(item_, r, result);
      }
    }
    if (item_.work.merge >= 0) arrive(item_);
  }

  const Item<K>& item_;
  Scratch<K>& m_;
  KeyTile<K>& tile_;
};

}  // namespace warploom
