// The same product in AMX's tile registers, where a machine and its system have them: 16 x 16 sums
// take 16 words of each row and each column at once. Operands are packed as for vectors.
#pragma once

#include <warploom/compute/dot_bf16.hpp>
#include <warploom/compute/matmul.hpp>

#if defined(WL_HAS_DOT_BF16) && defined(__AMX_BF16__) && defined(__linux__)
#define WL_HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace warploom {

#if defined(WL_HAS_AMX)

inline constexpr int kTileRows = 16;   // rows of every tile register
inline constexpr int kTileWords = 16;  // 32-bit words of a row
static_assert(kTileWords == kLanes, "a column of tiles is a column of vectors");

// Words and packing are those of vectors: either product can take them.
struct DotAmx : DotBf16 {
  static constexpr int kBlockRows = 2 * kTileRows;
  static constexpr bool kInTiles = true;
};

WL_INLINE Rows<DotBf16> in_vectors(Rows<DotAmx> a) { return {a.data, a.stride, a.rows, a.usual}; }
template <int kTail>
WL_INLINE Panels<DotBf16, kTail> in_vectors(Panels<DotAmx, kTail> b) {
  return {b.data, b.stride, b.begin, b.end, b.last};
}

// Linux hands out tile registers on request, for the whole process; a sandbox may refuse.
inline bool has_tile_registers() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// Shapes all tile registers of a thread for as long as this lives.
class TileRegisters {
 public:
  TileRegisters() {
    if (!has_tile_registers()) return;
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = 4 * kTileWords;
      shapes.rows[tile] = kTileRows;
    }
    _tile_loadconfig(&shapes);
  }
  ~TileRegisters() {
    if (has_tile_registers()) _tile_release();
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// Compilers do not know what memory the tile instructions read and write.
WL_INLINE void order_memory() { asm volatile("" ::: "memory"); }

// Rows [begin, end) of two tiles side by side in a panel, to the first-level cache: loads of tile
// registers do not run ahead of the products before them, and panels come from the second level.
template <int kBegin, int kEnd>
WL_INLINE void prefetch_tiles(const std::int32_t* b) {
  WL_UNROLL for (int i = kBegin; i < kEnd; ++i) {
    __builtin_prefetch(b + i * kPanel);
    __builtin_prefetch(b + i * kPanel + kTileWords);
  }
}

// A right operand of tiles: a panel from the first of its columns on, and the one that follows.
struct TilePanel {
  const std::int32_t *begin, *next;
};

// kRowTiles x kColumnTiles tiles of sums, 1 or 2 of each, into `c`, whose rows lie `c_stride`
// apart: rows of A exist up to the whole tile.
template <int kRowTiles, int kColumnTiles>
WL_INLINE void amx_tiles(const std::int32_t* a, int stride, TilePanel panel, int steps, float* c,
                         int c_stride) {
  const std::int32_t* const b = panel.begin;
  const std::int32_t* const lower = a + kTileRows * stride;
  const std::int32_t* const right = b + kTileWords;
  order_memory();
  _tile_zero(0);
  if constexpr (kColumnTiles > 1) _tile_zero(1);
  if constexpr (kRowTiles > 1) _tile_zero(2);
  if constexpr (kRowTiles > 1 && kColumnTiles > 1) _tile_zero(3);
  for (int k = 0; k < steps; k += kTileWords) {
    _tile_loadd(4, a + k, 4 * stride);
    _tile_loadd(6, b + k * kPanel, 4 * kPanel);
    if constexpr (kColumnTiles > 1) _tile_loadd(7, right + k * kPanel, 4 * kPanel);
    if constexpr (kRowTiles > 1) _tile_loadd(5, lower + k, 4 * stride);
    // Back to back, products take up to half as long again: fetching is spread between them.
    const std::int32_t* const ahead =
        k + kTileWords < steps ? b + (k + kTileWords) * kPanel : panel.next;
    prefetch_tiles<0, 4>(ahead);
    _tile_dpbf16ps(0, 4, 6);
    prefetch_tiles<4, 8>(ahead);
    if constexpr (kColumnTiles > 1) _tile_dpbf16ps(1, 4, 7);
    prefetch_tiles<8, 12>(ahead);
    if constexpr (kRowTiles > 1) _tile_dpbf16ps(2, 5, 6);
    prefetch_tiles<12, 16>(ahead);
    if constexpr (kRowTiles > 1 && kColumnTiles > 1) _tile_dpbf16ps(3, 5, 7);
  }
  float* const c_lower = c + kTileRows * c_stride;
  _tile_stored(0, c, 4 * c_stride);
  if constexpr (kColumnTiles > 1) _tile_stored(1, c + kTileWords, 4 * c_stride);
  if constexpr (kRowTiles > 1) _tile_stored(2, c_lower, 4 * c_stride);
  if constexpr (kRowTiles > 1 && kColumnTiles > 1) {
    _tile_stored(3, c_lower + kTileWords, 4 * c_stride);
  }
  order_memory();
}

// Calls `tiles(rows, columns, row, column, panel)` for blocks of up to two by two tiles: the
// numbers of its tiles as constants, its place in C, and its part of B.
template <int kTail, class Tiles>
WL_INLINE void amx_blocks(int rows, Panels<DotAmx, kTail> b, Tiles tiles) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  const auto all_rows = [&](auto columns, int column, TilePanel panel) {
    for (int row = 0; row < rows; row += 2 * kTileRows) {
      if (rows - row > kTileRows) {
        tiles(Two{}, columns, row, column, panel);
      } else {
        tiles(One{}, columns, row, column, panel);
      }
    }
  };
  for (int j = b.begin; j < b.end; ++j) {
    const int vectors = j < b.last ? kMicroVectors : kTail;
    const std::int32_t* const panel = b.data + j * b.stride;
    const std::int32_t* const next = j + 1 < b.end ? panel + b.stride : panel;
    for (int n = 0; n < vectors; n += 2) {
      const std::int32_t* const here = panel + n * kLanes;
      const TilePanel operand{here, n + 2 < vectors ? here + 2 * kLanes : next};
      if (n + 1 < vectors) {
        all_rows(Two{}, j * kPanel + n * kLanes, operand);
      } else {
        all_rows(One{}, j * kPanel + n * kLanes, operand);
      }
    }
  }
}

// Few rows leave most of a tile empty, and a system may grant no tiles. The rows at hand do not
// decide: tiles sum the first and the second numbers of pairs apart, and a row's last bits would
// tell how long its chunk is.
inline bool use_tile_registers(int usual_rows) {
  return usual_rows > kMicroRows && has_tile_registers();
}

// Products of A and B as vectors have them. Rows of A exist up to a multiple of kTileRows; `steps`
// is a multiple of kTileWords.
template <int kTail, class Done>
WL_INLINE void matmul(Rows<DotAmx> a, Panels<DotAmx, kTail> b, int steps, Done done) {
  if (!use_tile_registers(a.usual)) return matmul(in_vectors(a), in_vectors(b), steps, done);
  alignas(64) float sums[2 * kTileRows][2 * kTileWords];
  amx_blocks(a.rows, b, [&](auto high, auto wide, int row, int column, TilePanel panel) {
    amx_tiles<high, wide>(a.data + row * a.stride, a.stride, panel, steps, &sums[0][0],
                          2 * kTileWords);
    for (int m = 0; m < min_int(2 * kTileRows, a.rows - row); ++m) {
      for (int n = 0; n < wide; ++n) {
        done(row + m, column + n * kLanes, load_vec(&sums[m][n * kLanes]));
      }
    }
  });
}

// C, too, has rows up to a multiple of kTileRows.
template <int kTail>
WL_INLINE void matmul_into(Rows<DotAmx> a, Panels<DotAmx, kTail> b, int steps, float* c,
                           int stride) {
  if (!use_tile_registers(a.usual)) {
    return matmul_into(in_vectors(a), in_vectors(b), steps, c, stride);
  }
  amx_blocks(a.rows, b, [&](auto high, auto wide, int row, int column, TilePanel panel) {
    amx_tiles<high, wide>(a.data + row * a.stride, a.stride, panel, steps,
                          c + row * stride + column, stride);
  });
}

#else

struct TileRegisters {};

#endif

struct NoTileRegisters {};

}  // namespace warploom
