// The two products of attention for one consumer group of 128 threads: WGMMA with operands in the
// staged tiles' own swizzled layout, and probabilities from registers.
//
// A group's accumulators are laid out as a warp's in mma.cuh: warp w of the CTA has rows 16 w .. 16
// w + 15.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>
#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include <warploom/hopper/shared.cuh>
#include <warploom/mma.cuh>

namespace warploom::hopper {

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

template <class K>
class GroupMma {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Element = typename CutlassType<typename C::Element>::type;
  using Int0 = cute::Int<0>;
  template <int kN>
  using Int = cute::Int<kN>;

  static constexpr bool kWide = S::kBlock == 64;  // 128-byte swizzle, or 64
  using KMajor = cute::conditional_t<kWide, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                     cute::GMMA::Layout_K_SW64_Atom<Element>>;
  using MnMajor = cute::conditional_t<kWide, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                      cute::GMMA::Layout_MN_SW64_Atom<Element>>;
  using QueryLayout = decltype(cute::tile_to_shape(
      KMajor{}, cute::Shape<Int<C::kRows>, Int<S::kDimQk>, Int<C::kQueryStages>>{}));
  using KeyLayout = decltype(cute::tile_to_shape(
      KMajor{}, cute::Shape<Int<C::kKeys>, Int<S::kDimQk>, Int<C::kStages>>{}));
  // V is staged token by token; the product wants its transpose, so tokens are the second mode.
  using ValueLayout = decltype(cute::tile_to_shape(
      MnMajor{}, cute::Shape<Int<S::kDimV>, Int<C::kKeys>, Int<C::kStages>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
  using ScoresMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, Int<C::kKeys>, Int<S::kDimQk>>>()));
  using OutputMma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, Int<S::kDimV>, Int<C::kKeys>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>()));

 public:
  using Scores = typename WarpMma<K>::Scores;
  using Output = typename WarpMma<K>::Output;
  // Probabilities as the left operand: per 16 keys four registers of two.
  using Probabilities = unsigned[C::kKeys / 16][4];

  WL_FN GroupMma(Shared<K> shared, int group) : shared_(shared), group_(group) {}

  // Starts scores = Q K^T.
  WL_FN void start_scores(int query_stage, int stage, Scores& scores) const {
    ScoresMma mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    const auto queries = cute::local_tile(
        cute::make_tensor(cute::make_smem_ptr(elements(shared_.queries(0))), QueryLayout{}),
        cute::Shape<cute::_64, Int<S::kDimQk>>{}, cute::make_coord(group_, Int0{}, query_stage));
    const auto keys =
        cute::make_tensor(cute::make_smem_ptr(elements(shared_.keys(0))), KeyLayout{});
    const auto a = thread.partition_fragment_A(queries);
    const auto b = thread.partition_fragment_B(keys);
    auto c = accumulators<ScoresMma, C::kKeys>(&scores[0][0][0]);
    cute::warpgroup_fence_operand(c);
    cute::warpgroup_arrive();
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
#pragma unroll
    for (int k = 0; k < S::kDimQk / 16; ++k) {
      cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k, stage), c);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_fence_operand(c);
  }

  // Starts output += P V, or output = P V.
  WL_FN void start_output(Probabilities& probabilities, int stage, bool is_first,
                          Output& output) const {
    OutputMma mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    const auto values =
        cute::make_tensor(cute::make_smem_ptr(elements(shared_.values(0))), ValueLayout{});
    using Fragment = cute::Layout<
        cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, Int<C::kKeys / 16>>>;
    const auto a = cute::make_tensor(reinterpret_cast<Element*>(&probabilities[0][0]), Fragment{});
    const auto b = thread.partition_fragment_B(values);
    auto c = accumulators<OutputMma, S::kDimV>(&output[0][0][0]);
#pragma unroll
    for (int i = 0; i < C::kKeys / 4; ++i) {
      cute::warpgroup_fence_operand((&probabilities[0][0])[i]);
    }
    cute::warpgroup_fence_operand(c);
    cute::warpgroup_arrive();
    mma.accumulate_ = is_first ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One;
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k) {
      cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k, stage), c);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_fence_operand(c);
  }

  // Waits until at most kPending of the products started last still run.
  template <int kPending>
  WL_FN static void wait() {
    cute::warpgroup_wait<kPending>();
  }

  WL_FN static void pack(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
    for (int n = 0; n < C::kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        probabilities[n / 2][n % 2 * 2 + i] = warploom::pack(
            typename K::Config::Element{}, scores[0][n][2 * i], scores[0][n][2 * i + 1]);
      }
    }
  }

 private:
  WL_FN static Element* elements(typename C::Element* staged) {
    return reinterpret_cast<Element*>(staged);
  }
  template <class Mma, int kColumns>
  WL_FN static auto accumulators(float* registers) {
    using Layout =
        decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::_64, Int<kColumns>>{})
                     .layout());
    return cute::make_tensor(cute::make_rmem_ptr(registers), Layout{});
  }

  Shared<K> shared_;
  int group_;
};

}  // namespace warploom::hopper
