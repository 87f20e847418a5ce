// One work item: FlashAttention-2 over the item's keys, for the rows of one query tile.
#pragma once

#include <warploom/compute/dot_fp32.hpp>
#include <warploom/compute/matmul_amx.hpp>
#include <warploom/compute/output.hpp>
#include <warploom/compute/pack.hpp>
#include <warploom/compute/softmax.hpp>

namespace warploom {

// Pairs of bfloat16 numbers, kSummed in all; tile registers take whole tiles of them.
#if defined(WL_HAS_AMX)
template <int kSummed>
using DotPairs = std::conditional_t<kSummed % (2 * kTileWords) == 0, DotAmx, DotBf16>;
#elif defined(WL_HAS_DOT_BF16)
template <int kSummed>
using DotPairs = DotBf16;
#else
template <int kSummed>
using DotPairs = DotFp32;
#endif

// Pairs come from tensors as they are stored. What a transform made, and what has 8 bits, becomes
// float32.
template <class Element, bool kAsStored, int kSummed>
using DotOf = std::conditional_t<kAsStored && std::is_same_v<Element, bfloat16_t>,
                                 DotPairs<kSummed>, DotFp32>;

// Sizes and types that follow from a kernel's configuration.
template <class K>
struct Shape {
  using Config = typename K::Config;
  using Variant = typename K::Variant;
  using Element = typename Config::Element;
  static constexpr bool kIsWide = std::is_same_v<Element, typename Config::KvElement>;
  static constexpr bool kScoresAsStored =
      kIsWide && !Variant::kHasQueryTransform && !Variant::kHasKeyTransform;
  using Scores = DotOf<Element, kScoresAsStored, Config::kHeadDimQk>;
  static constexpr int kChunk = 2 * kLanes;  // keys are padded to it
  using Outputs = DotOf<Element, kIsWide && !Variant::kHasValueTransform, kChunk>;

  using Registers =
      std::conditional_t<Scores::kInTiles || Outputs::kInTiles, TileRegisters, NoTileRegisters>;

  static constexpr int kRows = Config::kRows;
  static constexpr int kKeys = Config::kKeys;
  // Rows that share a pass over a tile of keys; what multiplies them may read up to whole tiles.
  static constexpr int kBlock = max_int(Scores::kBlockRows, Outputs::kBlockRows);
  static constexpr int kPaddedRows = round_up(kRows, kBlock);
  static constexpr int kScoreSteps = Config::kHeadDimQk / Scores::kPerWord;
  static constexpr int kOutputSteps = kKeys / Outputs::kPerWord;
  static constexpr int kKeyPanels = ceil_div(kKeys, kPanel);
  static constexpr int kKeyPanelSize = kScoreSteps * kPanel;
  static constexpr int kValueVectors = ceil_div(Config::kHeadDimV, kLanes);
  static constexpr int kValuePanels = ceil_div(kValueVectors, kMicroVectors);
  static constexpr int kValuePanelSize = kOutputSteps * kPanel;
  static constexpr int kValueTail = kValueVectors - (kValuePanels - 1) * kMicroVectors;
  static constexpr int kLogitStride = kKeyPanels * kPanel;
  static constexpr bool kStagesInputs =
      Variant::kHasQueryTransform || Variant::kHasKeyTransform || Variant::kHasValueTransform;
  static constexpr int kStageDim =
      kStagesInputs ? max_int(Config::kHeadDimQk, Config::kHeadDimV) : 1;
  static constexpr int kNewValues = Variant::kHasValueTransform ? kKeys * Config::kHeadDimV : 1;
  static_assert(kKeys % kPanel == 0, "tiles of keys are whole panels");
};

// Memory of one thread, kept over its items.
template <class K>
struct alignas(64) Scratch {
  using S = Shape<K>;
  alignas(64) typename S::Scores::Word query[S::kPaddedRows * S::kScoreSteps];
  alignas(64) typename S::Scores::Word keys[S::kKeyPanels * S::kKeyPanelSize];
  alignas(64) typename S::Outputs::Word values[S::kValuePanels * S::kValuePanelSize];
  alignas(64) float logits[S::kBlock * S::kLogitStride];
  alignas(64) typename S::Outputs::Word weights[S::kBlock * S::kOutputSteps];
  alignas(64) float new_values[S::kNewValues];
  Running running[S::kRows];
  KeyTile<K> tile;
  States<K> states;
  Stage<S::kStageDim> stage;
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
  Attention(const Item<K>& item, Scratch<K>& scratch)
      : item_(item), m_(scratch), tile_(m_.tile), ahead_(item) {}

  void run() {
    load_queries();
    for (int r = 0; r < item_.rows; ++r) m_.running[r] = Running();
    for (int key = item_.work.kv_begin; key < item_.work.kv_end; key += Config::kKeys) {
      tile_.gather(item_, key, min_int(Config::kKeys, item_.work.kv_end - key));
      const int next = key + Config::kKeys;
      ahead_.start(next, min_int(next + Config::kKeys, item_.work.kv_end));
      if (classify(0, item_.rows) != TileClass::kSkip) run_tile();
    }
    finish();
  }

 private:
  void load_queries() {
    const Element* rows[Item<K>::kPadded];
    for (int r = 0; r < Item<K>::kPadded; ++r) {
      rows[r] = r < item_.rows ? static_cast<const Element*>(item_.p.q) + item_.q_offset(r)
                               : kZeroRow<Element>;
    }
    if constexpr (Variant::kHasQueryTransform) {
      transform_queries(rows);
    } else {
      for (int r = 0; r < item_.rows; ++r) {
        for (int step = 0; step < S::kScoreSteps; step += kLanes) {
          const int count = min_int(kLanes, S::kScoreSteps - step);
          const auto words = Scores::load_along(rows[r] + step * Scores::kPerWord, count);
          store_part(m_.query + r * S::kScoreSteps + step, words, 4 * count);
        }
      }
    }
  }

  void transform_queries(const Element* const* rows) {
    constexpr int kDim = Config::kHeadDimQk;
    for (int first = 0; first < item_.rows; first += kPanel) {
      const auto place = row_place(item_, first);
      transform_rows<QueryHook<Variant>, kDim>(item_.p, item_.tile, place, rows + first,
                                               m_.stage.before, m_.stage.after);
      unpack_panel<kDim>(m_.stage.after, min_int(kPanel, item_.rows - first),
                         m_.query + first * kDim, kDim);
    }
  }

  TileClass classify(int begin, int end) const {
    if (tile_.kv_pos.begin >= tile_.kv_pos.end) return TileClass::kSkip;
    const TileClass c = item_.classify(begin, end, tile_.kv_pos);
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
      for (int first = 0; first < padded; first += kPanel) {  // a panel is the operand's own layout
        transform_rows<KeyHook<Variant>, kDim>(item_.p, item_.tile, KeyPlace{tile_.column + first},
                                               tile_.key + first, m_.stage.before,
                                               m_.keys + first / kPanel * S::kKeyPanelSize);
      }
    } else {
      pack_transposed<Scores, kDim>(tile_.key, padded, m_.keys);
    }
  }

  void pack_values(int padded) {
    constexpr int kDim = Config::kHeadDimV;
    if constexpr (Variant::kHasValueTransform) {
      const float* rows[Config::kKeys];
      for (int first = 0; first < padded; first += kPanel) {
        float* out = m_.new_values + first * kDim;
        transform_rows<ValueHook<Variant>, kDim>(
            item_.p, item_.tile, KeyPlace{tile_.column + first}, tile_.value + first,
            m_.stage.before, m_.stage.after);
        unpack_panel<kDim>(m_.stage.after, kPanel, out, kDim);
        for (int j = 0; j < kPanel; ++j) {  // a hook may make anything of a row that does not exist
          rows[first + j] = tile_.exists(first + j) ? out + j * kDim : kZeroRow<float>;
        }
      }
      pack_rows<Outputs, kDim>(rows, padded, m_.values, S::kValuePanelSize);
    } else {
      pack_rows<Outputs, kDim>(tile_.value, padded, m_.values, S::kValuePanelSize);
    }
  }

  void run_block(int first, int rows, int padded) {
    const TileClass c = classify(first, first + rows);
    if (c == TileClass::kSkip) return;
    Range keys = c == TileClass::kFull ? Range{0, padded} : visible(first, rows, padded);
    if (keys.begin >= keys.end) return;
    const Panels<Scores, kMicroVectors> k{m_.keys, S::kKeyPanelSize, keys.begin / kPanel,
                                          ceil_div(keys.end, kPanel), S::kKeyPanels};
    const Rows<Scores> q{m_.query + first * S::kScoreSteps, S::kScoreSteps, rows, usual_rows()};
    matmul_into(q, k, S::kScoreSteps, m_.logits, S::kLogitStride);
    float rescale[S::kBlock];
    for (int row = 0; row < rows; ++row) {
      rescale[row] = weigh(first + row, row, keys, c == TileClass::kPartial);
    }
    add_values(first, rows, keys, rescale);
  }

  // Rows of an item as a rule, the same for all chunks of a request: the smallest tiles are for
  // decodes, whose rows are the heads of one query.
  int usual_rows() const {
    return S::kRows > 2 * kMicroRows ? S::kRows : min_int(S::kRows, item_.p.group_size);
  }

  // Keys of the tile that rows of a block may see, in whole chunks.
  Range visible(int first, int rows, int padded) const {
    if constexpr (Config::kColumnPositions) return {0, padded};
    const Range b = item_.kv_bounds(first, first + rows);
    const int begin = max_int(0, b.begin - tile_.first_pos);
    const int end = min_int(padded, b.end - tile_.first_pos);
    return {begin / S::kChunk * S::kChunk, round_up(end, S::kChunk)};
  }

  // Logits of one row to weights; returns the factor of the row's output so far.
  float weigh(int r, int row, Range keys, bool masked) {
    float* s = m_.logits + row * S::kLogitStride;
    auto* weights = m_.weights + row * S::kOutputSteps;
    const int end = min_int(keys.end, tile_.count);
    const LogitScale scale = logit_scale<Variant>(item_.p.sm_scale);
    const bool asks_mask = (Variant::kHasLogitsMask || Config::kColumnPositions) && masked;
    if constexpr (Variant::kRecords) {
      if (asks_mask) record_logits<K, true>(item_, tile_, r, keys.begin, end, s);
      if (!asks_mask) record_logits<K, false>(item_, tile_, r, keys.begin, end, s);
    }
    if (asks_mask) {
      apply_logits<K, true>(item_, tile_, r, keys.begin, end, scale.early, s);
    } else if (Variant::kHasLogitsTransform || scale.early != 1.0f) {
      apply_logits<K, false>(item_, tile_, r, keys.begin, end, scale.early, s);
    }
    for (int j = end; j < keys.end; ++j) s[j] = kMasked<Variant>;
    if constexpr (Variant::kSoftmax) {
      return softmax_row<Outputs>(s, keys.begin, keys.end, scale.late, weights, m_.running[r],
                                  [&]() WL_LAMBDA_INLINE { ahead_.fetch_line(); });
    } else {
      copy_row<Outputs>(s, keys.begin, keys.end, weights);
      return 1.0f;
    }
  }

  void add_values(int first, int rows, Range keys, const float* rescale) {
    constexpr int kPerWord = Outputs::kPerWord;
    float* out = m_.states.row(first);
    const int skipped = keys.begin / kPerWord;
    const Panels<Outputs, S::kValueTail> v{m_.values + skipped * kPanel, S::kValuePanelSize, 0,
                                           S::kValuePanels, S::kValuePanels - 1};
    const Rows<Outputs> weights{m_.weights + skipped, S::kOutputSteps, rows, usual_rows()};
    const int steps = (keys.end - keys.begin) / kPerWord;
    if (!std::exchange(has_outputs_[first / S::kBlock], true)) {
      matmul_into(weights, v, steps, out, States<K>::kStride);
      return;
    }
    matmul(weights, v, steps, [&](int row, int column, Vec sum) WL_LAMBDA_INLINE {
      float* at = out + row * States<K>::kStride + column;
      store_vec(at, fma_vec(broadcast(rescale[row]), load_vec(at), sum));
    });
  }

  void finish() {
    States<K>& states = m_.states;
    for (int begin = 0; begin < item_.rows; begin += S::kBlock) {  // blocks that saw no key
      if (has_outputs_[begin / S::kBlock]) continue;
      states.clear(begin, min_int(begin + S::kBlock, item_.rows));
    }
    for (int r = 0; r < item_.rows; ++r) {
      states.set_state(r, m_.running[r].max[0], sum_lanes(m_.running[r].sum)[0]);
    }
    if (item_.work.slot < 0) {
      write_outputs(item_, states);
    } else {
      write_partials(item_, states);
    }
    if (item_.work.merge >= 0) arrive(item_, states);
  }

  const Item<K>& item_;
  Scratch<K>& m_;
  KeyTile<K>& tile_;
  KeysAhead<K> ahead_;
  bool has_outputs_[S::kPaddedRows / S::kBlock] =
      {};  // of blocks: their first are stored, not added
};

}  // namespace warploom
