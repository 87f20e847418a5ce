// wgmma: products of 64 rows and 16 terms by a group of four warps. A product is worked out when a
// warp waits for it, as late as can be, so that operands which were given back too early show.
#pragma once

#include <cute/arch/util.hpp>
#include <warploom/variant.hpp>

namespace cute {

// As in the PTX ISA, matrix descriptors of wgmma; distances are in units of 16 bytes.
union GmmaDescriptor {
  std::uint64_t desc_ = 0;
  std::uint32_t reg32_[2];
  struct {
    std::uint16_t start_address_ : 14, : 2;
    std::uint16_t leading_byte_offset_ : 14, : 2;
    std::uint16_t stride_byte_offset_ : 14, : 2;
    std::uint16_t : 14, layout_type_ : 2;
  } bitfield;
};

// Bits of the element at a row and column of a staged operand.
inline unsigned short staged_bits(std::uint64_t descriptor, unsigned row, unsigned column) {
  GmmaDescriptor of;
  of.desc_ = descriptor;
  const unsigned row_bytes = of.bitfield.layout_type_ == 1 ? 128 : 64, width = row_bytes / 2;
  const unsigned units = of.bitfield.start_address_ +
                         column / width * of.bitfield.leading_byte_offset_ +
                         row / 8 * of.bitfield.stride_byte_offset_;
  const unsigned at = units * 16 + row % 8 * row_bytes + column % width * 2;
  unsigned short bits;
  std::memcpy(&bits, warploom::hopper::shared_memory + swizzled(at, row_bytes), sizeof(bits));
  return bits;
}

namespace SM90::GMMA {

enum class LayoutType { B128 = 1, B64 = 2 };
enum class Major { K, MN };
enum class ScaleOut { Zero, One };

// What one thread has of one product.
struct Product {
  unsigned registers[4];  // of the left operand, unless that is staged
  std::uint64_t left, right;
  float* sums;
  bool adds;
  void (*compute)(const Product&, std::size_t index);
};
// Of one thread, in order.
struct Products {
  std::vector<Product> issued;
  std::size_t done = 0;
  std::deque<std::size_t> batches;  // where each ends
};
inline std::vector<std::vector<Products>> of_ctas;
static const bool kBegins = fibers::do_at_begin(
    [] { of_ctas.assign(gridDim.x, std::vector<Products>(blockDim.x)); });
inline Products* of_threads() { return of_ctas[blockIdx.x].data(); }

// An accumulator, or whether it is added to.
struct Last {
  Last(float& sum) : sum(&sum) {}
  Last(ScaleOut scale) : scale(scale) {}
  float* sum = nullptr;
  ScaleOut scale = ScaleOut::Zero;
};

inline void issue(Product product, std::initializer_list<Last> last) {
  product.sums = last.begin()->sum;
  product.adds = (last.end() - 1)->scale == ScaleOut::One;
  of_threads()[fibers::running].issued.push_back(product);
}

// A thread's sums: of rows lane / 4 and 8 behind, two columns of every eight.
template <class Element, int kColumns, class Left, class Right>
void multiply(const Product& own, Left left, Right right) {
  const unsigned lane = fibers::running % 32;
  float rows[2][16];
  for (unsigned i = 0; i < 32; ++i) {
    rows[i / 16][i % 16] = warploom::to_float(Element{left(lane / 4 + i / 16 * 8, i % 16)});
  }
  for (unsigned i = 0; i < kColumns / 4; ++i) {
    const unsigned column = i / 2 * 8 + lane % 4 * 2 + i % 2;
    float* const sums = own.sums + i / 2 * 4 + i % 2;
    float found[2] = {own.adds ? sums[0] : 0.0f, own.adds ? sums[2] : 0.0f};
    for (unsigned term = 0; term < 16; ++term) {
      const float number = warploom::to_float(Element{right(term, column)});
      for (int half = 0; half < 2; ++half) found[half] += rows[half][term] * number;
    }
    sums[0] = found[0], sums[2] = found[1];
  }
}

// `Element` numbers; kColumns columns. The right operand's columns are rows of its tile, or, if the
// left one is in registers, its own.
template <class Element, int kColumns>
struct FromStaged {
  template <class... Sums>
  static void fma(std::uint64_t left, std::uint64_t right, Sums&&... sums) {
    issue({{}, left, right, nullptr, false, compute}, {Last(sums)...});
  }

 private:
  static void compute(const Product& own, std::size_t) {
    const auto left = [&](unsigned row, unsigned term) {
      return staged_bits(own.left, fibers::running / 32 % 4 * 16 + row, term);
    };
    const auto right = [&](unsigned term, unsigned column) {
      return staged_bits(own.right, column, term);
    };
    multiply<Element, kColumns>(own, left, right);
  }
};

template <class Element, int kColumns>
struct FromRegisters {
  template <class... Sums>
  static void fma(unsigned a, unsigned b, unsigned c, unsigned d, std::uint64_t right,
                  Sums&&... sums) {
    issue({{a, b, c, d}, 0, right, nullptr, false, compute}, {Last(sums)...});
  }

 private:
  static void compute(const Product& own, std::size_t index) {
    const unsigned first = fibers::running / 4 * 4;  // of four threads that share rows
    fibers::wait_until([=] {
      const auto has = [=](const Products& other) { return other.issued.size() > index; };
      return std::all_of(of_threads() + first, of_threads() + first + 4, has);
    });
    const auto left = [&](unsigned row, unsigned term) {
      const Product& other = of_threads()[first + term % 8 / 2].issued[index];
      return static_cast<unsigned short>(other.registers[row / 8 + term / 8 * 2] >>
                                         16 * (term % 2));
    };
    const auto right = [&](unsigned term, unsigned column) {
      return staged_bits(own.right, term, column);
    };
    multiply<Element, kColumns>(own, left, right);
  }
};

template <class>
constexpr int kColumnsOf = 0;
template <int kColumns>
constexpr int kColumnsOf<Shape<_64, Int<kColumns>, _16>> = kColumns;

template <class A, class B, class C, class Shape>
FromStaged<A, kColumnsOf<Shape>> ss_op_selector();
template <class A, class B, class C, class Shape, Major, Major>
FromRegisters<A, kColumnsOf<Shape>> rs_op_selector();

}  // namespace SM90::GMMA

inline void warpgroup_arrive() {}
template <class Register>
void warpgroup_fence_operand(Register&) {}
inline void warpgroup_commit_batch() {
  auto& own = SM90::GMMA::of_threads()[fibers::running];
  own.batches.push_back(own.issued.size());
}
template <int kPending>
void warpgroup_wait() {
  const unsigned thread = fibers::running;
  auto* const all = SM90::GMMA::of_threads();
  for (; all[thread].batches.size() > kPending; all[thread].batches.pop_front()) {
    for (auto& done = all[thread].done; done < all[thread].batches.front(); ++done) {
      const auto product = all[thread].issued[done];
      product.compute(product, done);
    }
  }
}

}  // namespace cute
