// What a rendered `struct Variant` overrides: the variant that changes nothing.
// Included by variant.cuh and variant.hpp, which define WL_FN and the math of namespace warploom.
#pragma once

namespace warploom {

constexpr int kRowCode = 512;  // ROW_CODE of layout.py: most rows of a composed tile

struct Range {  // half open
  int begin, end;
};

// kOpen: partial, but only the mask's open part hides elements. classify() calls it partial.
enum class TileClass : int { kSkip = 0, kPartial = 1, kFull = 2, kOpen = 3 };

WL_FN TileClass tile_class(bool may_see, bool may_hide) {
  if (!may_see) return TileClass::kSkip;
  return may_hide ? TileClass::kPartial : TileClass::kFull;
}

struct TileInfo {  // the same for all of a work item
  int batch, kv_head, q_len, kv_len, num_q_heads, num_kv_heads;
};

struct RowInfo {  // one fused query row
  int q_pos, q_head, q_row;
};

// Lane l of the first half of `width` lanes is paired with lane l of the second.
WL_FN int half_partner(int lane, int width) {
  return lane < width / 2 ? lane + width / 2 : lane - width / 2;
}

// How a hook reads its vector other than by x(lane): own() at the lane that it computes, pair() and
// half() at that lane's partner. A base for vectors whose reads all go by lane.
template <class X>
struct LaneByLane {
  WL_FN float own(int lane) const { return x()(lane); }
  WL_FN float pair(int lane) const { return x()(lane ^ 1); }
  WL_FN float half(int lane, int width, int head_dim) const {
    return x()(clamp_index(half_partner(lane, width), head_dim));
  }

 private:
  WL_FN const X& x() const { return static_cast<const X&>(*this); }
};

// The scale for kernels that scale q.k late. A scale that is not positive would reverse the order
// of logits, so kernels multiply by it before anything else.
template <class Params>
WL_FN float positive_scale(const Params& p) {
  return p.sm_scale > 0.0f ? p.sm_scale : 1.0f;
}

// For stores of recorded values, which are rounded once to the output's type.
WL_FN bool is_inside(int index, int size) { return unsigned(index) < unsigned(size); }
template <class T>
WL_FN void write_number(T* to, long long offset, float value) {
  to[offset] = from_float<T>(value);
}

// Kernels test a kHas flag before they spend work on a hook; without it the function is the
// identity.
template <class Params>
struct IdentityVariant {
  static constexpr bool kSoftmax = true;  // false: the output is the plain sum of logits * value
  static constexpr bool kHasLogitsTransform = false;
  static constexpr bool kHasLogitsMask = false;
  static constexpr bool kHasLinearBias = false;
  static constexpr bool kHasQueryTransform = false;
  static constexpr bool kHasKeyTransform = false;
  static constexpr bool kHasValueTransform = false;
  static constexpr bool kHasOutputTransform = false;
  static constexpr bool kHasColState = false;
  static constexpr bool kMaskHasParts = false;
  static constexpr bool kMaskIsOfBounds = false;  // key_bits() has the mask for many keys
  static constexpr bool kMaskShowsRuns = false;   // each row sees a single run of keys
  static constexpr bool kClassesRead = false;     // classify() reads tensors
  static constexpr bool kLoadsElements = false;   // hooks on logits load numbers for each element
  static constexpr bool kRecords = false;         // record() stores something

  // Parts of logits() and mask() that do not depend on the element, computed once each.
  struct TileState {};
  struct RowState {};
  struct ColState {};
  WL_FN static TileState tile_state(const Params&, const TileInfo&) { return {}; }
  template <class TS>
  WL_FN static RowState row_state(const Params&, const TileInfo&, const TS&, const RowInfo&) {
    return {};
  }
  template <class TS>
  WL_FN static ColState col_state(const Params&, const TileInfo&, const TS&, int /*kv_pos*/) {
    return {};
  }

  // New value of one logit. On a CPU `logits` is sm_scale * q.k. In GPU kernels it is q.k, or that
  // product where the scale is not positive, and what the softmax takes is logits_factor() times
  // the result (codegen/lowering/logits_scale.py).
  template <class TS, class RS, class CS>
  WL_FN static float logits(const Params&, const TileInfo&, const TS&, const RowInfo&, const RS&,
                            int /*kv_pos*/, const CS&, float logits) {
    return logits;
  }
  WL_FN static float logits_factor(const Params& p) { return positive_scale(p); }
  // With kHasLinearBias, logits() leaves out a term of the transformed logits: linear_bias(), and
  // its growth from key to key, slope() (codegen/lowering/linear_bias.py). Else they are not
  // called.

  // Stores what the user wants to record of one element, which exists and is visible. `logits` is
  // sm_scale * q.k in all kernels (codegen/lowering/records.py).
  WL_FN static void record(const Params&, const TileInfo&, const RowInfo&, int /*kv_pos*/,
                           float /*logits*/) {}

  // Whether the row sees the key.
  template <class TS, class RS, class CS>
  WL_FN static bool mask(const Params&, const TileInfo&, const TS&, const RowInfo&, const RS&,
                         int /*kv_pos*/, const CS&) {
    return true;
  }

  // What mask() returns in a box of positions: never wrong, sometimes only kPartial. Ranges are not
  // empty.
  WL_FN static TileClass classify(const Params&, const TileInfo&, Range /*q_pos*/, Range /*kv_pos*/,
                                  Range /*q_head*/) {
    return TileClass::kFull;
  }
  // A mask with parts is `decided & open`. Intervals find tiles where the decided part holds
  // everywhere; they decide nothing for the open part, which mostly reads tensors. In tiles where
  // the decided part holds, only the open part is left to evaluate.
  WL_FN static bool decided_may_hide(const Params&, const TileInfo&, Range /*q_pos*/,
                                     Range /*kv_pos*/, Range /*q_head*/) {
    return true;
  }
  template <class TS, class RS, class CS>
  WL_FN static bool open_part(const Params&, const TileInfo&, const TS&, const RowInfo&, const RS&,
                              int /*kv_pos*/, const CS&) {
    return true;
  }
  // A range that holds every kv_pos some row of the box can see, inside [0, kv_len).
  WL_FN static Range kv_bounds(const Params&, const TileInfo& tile, Range /*q_pos*/,
                               Range /*q_head*/) {
    return {0, tile.kv_len};
  }

  // Vector hooks. x(lane) is the original vector; the function gives the new value of one lane,
  // with the help of what is the same for all lanes (..Tile) and for all vectors (..Lane). A hook
  // with reductions over lanes needs r[i], for i below its kReductions, before: the caller combines
  // reduce<i>(lane) over all lanes, in order of i (later reductions may read earlier ones).
  struct QueryTile {};
  struct QueryLane {};
  struct KeyTile {};
  struct KeyLane {};
  struct ValueTile {};
  struct ValueLane {};
  struct OutputTile {};
  struct OutputLane {};
  // Lanes whose halves the hook pairs (RoPE): 0 none, -1 all of the vector.
  static constexpr int kQueryHalves = 0;
  static constexpr int kKeyHalves = 0;
  static constexpr int kValueHalves = 0;
  static constexpr int kOutputHalves = 0;
  // Whether the hook takes sines of an angle that grows evenly from key to key, in a kernel that
  // can make use of it. Then key_angle is that angle, key_rate its growth, and key_angle_lane a
  // lane with the same angle; the hook asks for sines by x.sine(lane, angle) and x.cosine(lane,
  // angle).
  static constexpr bool kKeySineRecurrence = false;
  static constexpr bool kValueSineRecurrence = false;
  static constexpr int kQueryReductions = 0;
  static constexpr int kKeyReductions = 0;
  static constexpr int kValueReductions = 0;
  static constexpr int kOutputReductions = 0;

  WL_FN static QueryTile query_tile(const Params&, const TileInfo&) { return {}; }
  template <class T>
  WL_FN static QueryLane query_lane(const Params&, const TileInfo&, const T&, int /*lane*/,
                                    int /*head_dim*/) {
    return {};
  }
  template <class L, class X>
  WL_FN static float query(const Params&, const TileInfo&, const RowInfo&, const L&, int lane,
                           int /*head_dim*/, const X& x, const float* /*r*/) {
    return x(lane);
  }
  WL_FN static KeyTile key_tile(const Params&, const TileInfo&) { return {}; }
  template <class T>
  WL_FN static KeyLane key_lane(const Params&, const TileInfo&, const T&, int /*lane*/,
                                int /*head_dim*/) {
    return {};
  }
  template <class L, class X>
  WL_FN static float key(const Params&, const TileInfo&, int /*kv_pos*/, const L&, int lane,
                         int /*head_dim*/, const X& x, const float* /*r*/) {
    return x(lane);
  }
  WL_FN static ValueTile value_tile(const Params&, const TileInfo&) { return {}; }
  template <class T>
  WL_FN static ValueLane value_lane(const Params&, const TileInfo&, const T&, int /*lane*/,
                                    int /*head_dim*/) {
    return {};
  }
  template <class L, class X>
  WL_FN static float value(const Params&, const TileInfo&, int /*kv_pos*/, const L&, int lane,
                           int /*head_dim*/, const X& x, const float* /*r*/) {
    return x(lane);
  }
  WL_FN static OutputTile output_tile(const Params&, const TileInfo&) { return {}; }
  template <class T>
  WL_FN static OutputLane output_lane(const Params&, const TileInfo&, const T&, int /*lane*/,
                                      int /*head_dim*/) {
    return {};
  }
  template <class L, class X>
  WL_FN static float output(const Params&, const TileInfo&, const RowInfo&, float /*lse*/, const L&,
                            int lane, int /*head_dim*/, const X& x, const float* /*r*/) {
    return x(lane);
  }

  // Where value() only multiplies the vector by a number: that number.
  static constexpr bool kScalesValues = false;
  WL_FN static float value_scale(const Params&, const TileInfo&, int /*kv_pos*/, int /*head_dim*/) {
    return 1.0f;
  }

  template <int I, class X>
  WL_FN static float query_reduce(const Params&, const TileInfo&, const RowInfo&, int /*lane*/,
                                  int /*head_dim*/, const X&, const float* /*r*/) {
    return 0.0f;
  }
  template <int I, class X>
  WL_FN static float key_reduce(const Params&, const TileInfo&, int /*kv_pos*/, int /*lane*/,
                                int /*head_dim*/, const X&, const float* /*r*/) {
    return 0.0f;
  }
  template <int I, class X>
  WL_FN static float value_reduce(const Params&, const TileInfo&, int /*kv_pos*/, int /*lane*/,
                                  int /*head_dim*/, const X&, const float* /*r*/) {
    return 0.0f;
  }
  template <int I, class X>
  WL_FN static float output_reduce(const Params&, const TileInfo&, const RowInfo&, float /*lse*/,
                                   int /*lane*/, int /*head_dim*/, const X&, const float* /*r*/) {
    return 0.0f;
  }

  template <int I> WL_FN static float query_identity() { return 0.0f; }
  template <int I> WL_FN static float key_identity() { return 0.0f; }
  template <int I> WL_FN static float value_identity() { return 0.0f; }
  template <int I> WL_FN static float output_identity() { return 0.0f; }
  template <int I> WL_FN static float query_combine(float a, float b) { return a + b; }
  template <int I> WL_FN static float key_combine(float a, float b) { return a + b; }
  template <int I> WL_FN static float value_combine(float a, float b) { return a + b; }
  template <int I> WL_FN static float output_combine(float a, float b) { return a + b; }
};

}  // namespace warploom
