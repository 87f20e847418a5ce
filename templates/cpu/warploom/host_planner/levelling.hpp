// Cuts what exceeds the mean load off CTAs' last items, and gives it to CTAs below the mean:
// `level` of scheduler/partition/balance.py.
#pragma once

#include <warploom/planner/memory.hpp>

namespace warploom {

// Cut from the end of the owner's last item for another CTA; in the item's visible key tiles.
struct Piece {
  int owner, cta, begin, end;
};

// A load and its CTA as one number, ordered by load, then by CTA. To split bits is faster than to
// divide. A load has all bits but kCtaBits and the sign.
WL_FN wide queued(wide load, int cta) { return load << kCtaBits | cta; }
WL_FN wide load_of(wide code) { return code >> kCtaBits; }
WL_FN int cta_of(wide code) { return int(code & ((1 << kCtaBits) - 1)); }

template <class Params>
class Levelling {
 public:
  WL_FN Levelling(const Params& p, char* memory) : p_(p) {
    Memory free(memory);
    free.take(most_, p.num_ctas);
    free.take(loads_, p.num_ctas);
    free.take(tiles_, p.num_ctas);
    free.take(ctas_, p.num_ctas);
    free.take(gives_, p.num_ctas);
    free.take(pieces_, 2 * p.num_ctas);
    scratch_end_ = free.end();
  }
  WL_FN char* scratch_end() const { return scratch_end_; }

  // Visible key tiles of the last item of a CTA; to be set before `find`.
  WL_FN int& tiles(int cta) { return tiles_[cta]; }

  // Finds pieces. `queue` has the loads as `queued`, in ascending order.
  WL_FN void find(const wide* queue, wide mean) {
    const int ctas = p_.active_ctas;
    count_ = owners_ = 0;
    for (int i = 0; i < ctas; ++i) {
      loads_[i] = load_of(queue[i]);
      ctas_[i] = cta_of(queue[i]);
      gives_[i] = 0;
    }
    const wide largest = loads_[ctas - 1];
    if (largest <= mean + mean / kWorthCutting) return;
    grain_ = wide(p_.per_tile) * p_.grain;
    piece_ = wide(p_.fixed) + p_.partial;
    opening_ = (piece_ + grain_ - 1) / grain_;
    // `kept` is the most load that a CTA keeps whatever it gives. A lower limit would cut items
    // without lowering the largest load.
    wide kept = mean + mean / kTolerance;
    for (int i = 0; i < ctas; ++i) {
      const wide most = max(tiles_[ctas_[i]] / p_.grain - 1, 0);
      most_[i] = most * grain_ <= p_.partial ? 0 : most;
      kept = max(kept, most_[i] > 0 ? loads_[i] + p_.partial - most_[i] * grain_ : loads_[i]);
    }
    wide limit = 0;
    const wide end = largest - largest / kWorthSaving + 1;
    if (lowest_fitting(kept, end, limit)) lay_out(limit);
  }

  WL_FN int pieces() const { return count_; }
  WL_FN int owners() const { return owners_; }
  WL_FN const Piece& piece(int i) const { return pieces_[i]; }
  WL_FN bool opens(int i) const { return i == 0 || pieces_[i].owner != pieces_[i - 1].owner; }
  WL_FN bool gives(int cta) const { return gives_[cta] != 0; }

 private:
  // Grains that the CTA at place i gives under a limit, and grains that it has room for.
  WL_FN wide given(int i, wide limit) const {
    if (loads_[i] <= limit) return 0;
    const wide above = loads_[i] + p_.partial - limit;
    return min((above + grain_ - 1) / grain_, most_[i]);
  }
  WL_FN wide room(int i, wide limit) const {
    const wide free = limit - piece_ - loads_[i];
    return free > 0 ? free / grain_ : 0;
  }

  WL_FN bool fits(wide limit) const {
    wide needed = 0, rooms = 0, givers = 0;
    for (int i = 0; i < p_.active_ctas; ++i) {
      const wide own = given(i, limit);
      needed += own;
      givers += own > 0;
      rooms += room(i, limit);
    }
    return needed + opening_ * (givers - 1) <= rooms;
  }

  // Finds the lowest limit in [begin, end) that fits, if all limits above a fitting one fit.
  WL_FN bool lowest_fitting(wide begin, wide end, wide& found) const {
    while (begin < end) {
      const wide step = (end - begin + kTried - 1) / kTried;
      wide tried = begin;
      while (tried < end && !fits(tried)) tried += step;
      if (tried < end && (tried == begin || step == 1)) {
        found = tried;
        return true;
      }
      begin = tried - step + 1;
      end = min(end, tried + 1);
    }
    return false;
  }

  // Lays the grains of all owners end to end over the rooms, the emptiest CTA first, and cuts at
  // each end. In front of each part but the first lie `opening_` grains, which take room but belong
  // to no piece.
  WL_FN void lay_out(wide limit) {
    const int ctas = p_.active_ctas;
    const auto next = [&](int i, auto value) {
      while (i < ctas && (this->*value)(i, limit) == 0) ++i;
      return i;
    };
    int owner = next(0, &Levelling::given), taker = next(0, &Levelling::room);
    if (owner == ctas) return;
    wide at = 0, owner_end = given(owner, limit), room_end = room(taker, limit);
    while (owner < ctas) {
      const wide own = given(owner, limit), end = min(owner_end, room_end);
      const wide begin = max(at, owner_end - own);
      if (begin < end) add(owner, taker, begin - owner_end, end - owner_end);
      at = end;
      if (at == room_end) {
        taker = next(taker + 1, &Levelling::room);
        if (taker < ctas) room_end += room(taker, limit);
      }
      if (at == owner_end) {
        owner = next(owner + 1, &Levelling::given);
        if (owner < ctas) owner_end += opening_ + given(owner, limit);
      }
    }
  }

  // An item's last grain ends with the item: places are counted back from there.
  WL_FN void add(int owner, int taker, wide begin, wide end) {
    const int from = ctas_[owner], tiles = tiles_[from];
    owners_ += gives_[from] == 0;
    gives_[from] = 1;
    pieces_[count_++] = {from, ctas_[taker], tiles + int(begin * p_.grain),
                         tiles + int(end * p_.grain)};
  }

  const Params& p_;
  wide *most_, *loads_;
  int *tiles_, *ctas_, *gives_;
  Piece* pieces_;
  char* scratch_end_;
  wide grain_ = 0, piece_ = 0, opening_ = 0;
  int count_ = 0, owners_ = 0;
};

}  // namespace warploom
