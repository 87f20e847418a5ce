// WGMMA on staged tiles: descriptors of operands in shared memory, and one instruction.
//
// CuTe's instructions are called with descriptors made here. Its tensors would derive the same ones
// from layouts, at half of a kernel's time to compile.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/arch/mma_sm90.hpp>

#include <warploom/staging/tile.cuh>

namespace warploom::hopper {

// A staged tile (panels of swizzled rows) as an operand that begins at some place of it. Distances
// are in units of 16 bytes, as in descriptors (PTX ISA, matrix descriptors of wgmma).
template <class Tile>
class StagedOperand {
  static constexpr int kRowVectors = 2 * Tile::kWidth / 16;
  static constexpr int kPanelUnits = Tile::kPanelBytes / 16;

 public:
  static constexpr int kVectors = Tile::kBytes / 16;
  WL_FN static constexpr int rows(int n) { return n * kRowVectors; }  // whole groups of 8
  WL_FN static constexpr int columns(int n) {                         // multiples of 8
    return n / Tile::kWidth * kPanelUnits + n % Tile::kWidth / 8;
  }

  // The product sums over the tile's columns: the distance from panel to panel is not used.
  WL_FN static StagedOperand by_rows(const void* tile) { return {tile, 1}; }
  // The product sums over the tile's rows, and an instruction goes from panel to panel.
  WL_FN static StagedOperand by_columns(const void* tile) { return {tile, kPanelUnits}; }

  WL_FN StagedOperand moved(int units) const {
    StagedOperand there = *this;
    there.low_ += units;
    return there;
  }
  WL_FN uint64_t descriptor() const {
    using cute::SM90::GMMA::LayoutType;
    cute::GmmaDescriptor made;
    made.bitfield.stride_byte_offset_ = rows(8);
    made.bitfield.layout_type_ =
        static_cast<int>(Tile::kWidth == 64 ? LayoutType::B128 : LayoutType::B64);
    made.reg32_[0] = low_;
    return made.desc_;
  }

 private:
  WL_FN StagedOperand(const void* tile, int leading_units)
      : low_(cute::cast_smem_ptr_to_uint(tile) >> 4 | leading_units << 16) {}

  uint32_t low_;  // start and leading distance; the upper word is the same for all: no register
};

template <class Element>
struct CutlassType;
template <>
struct CutlassType<half_t> {
  using type = cutlass::half_t;
};
template <>
struct CutlassType<bfloat16_t> {
  using type = cutlass::bfloat16_t;
};

// The product of 64 rows, 16 terms and kColumns columns: by the widest of CuTe's instructions, and
// by others for the columns left. An accumulator is laid out as in mma.cuh.
template <class Element, int kColumns>
class Wgmma {
  using Type = typename CutlassType<Element>::type;
  using Major = cute::SM90::GMMA::Major;
  using Scale = cute::SM90::GMMA::ScaleOut;

  static constexpr int kWidth = kColumns >= 256   ? 256
                                : kColumns >= 192 ? 192
                                : kColumns >= 128 ? 128
                                : kColumns >= 96  ? 96
                                : kColumns >= 64  ? 64
                                                  : 32;
  static constexpr int kLeft = kColumns - kWidth;
  static_assert(kLeft >= 0 && kLeft % 32 == 0, "tiles are whole panels");

 public:
  // c = a b^T, or c += a b^T; b's columns are rows of its tile.
  template <class A, class B>
  WL_FN static void from_staged(const A& a, const B& b, float* c, bool add) {
    using Op = decltype(cute::SM90::GMMA::ss_op_selector<Type, Type, float, Shape>());
    call<Op>(c, add, Registers{}, a.descriptor(), b.descriptor());
    if constexpr (kLeft > 0) {
      Wgmma<Element, kLeft>::from_staged(a, b.moved(B::rows(kWidth)), c + kWidth / 2, add);
    }
  }
  // c = a b, where a thread has `a` in registers, and the terms are rows of b.
  template <class B>
  WL_FN static void from_registers(const unsigned (&a)[4], const B& b, float* c, bool add) {
    using Op =
        decltype(cute::SM90::GMMA::rs_op_selector<Type, Type, float, Shape, Major::K, Major::MN>());
    call<Op>(c, add, Registers{}, a[0], a[1], a[2], a[3], b.descriptor());
    if constexpr (kLeft > 0) {
      Wgmma<Element, kLeft>::from_registers(a, b.moved(B::columns(kWidth)), c + kWidth / 2, add);
    }
  }

 private:
  using Shape = cute::Shape<cute::_64, cute::Int<kWidth>, cute::_16>;
  using Registers = cute::make_index_sequence<kWidth / 2>;

  template <class Op, size_t... kRegister, class... Operands>
  WL_FN static void call(float* c, bool add, cute::index_sequence<kRegister...>,
                         const Operands&... operands) {
    Op::fma(operands..., c[kRegister]..., add ? Scale::One : Scale::Zero);
  }
};

}  // namespace warploom::hopper
