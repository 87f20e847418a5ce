// What a warp that streams keys of its own reads of each of them: a lane loads it for one key or
// two, ahead of the products, and the threads that need it get it by shuffles. So the loads' time
// is that in which the keys come, and registers stay free.
#pragma once

#include <warploom/compute/fragments.cuh>

namespace warploom {

template <class K, class T>
class LaneKeys {
  using F = Fragments<K>;
  static constexpr int kKeys = Sizes<K>::kStagingKeys;
  static constexpr int kHeld = (kKeys + kWarpSize - 1) / kWarpSize;
  static constexpr int kWords = (sizeof(T) + 3) / 4;
  static_assert(Sizes<K>::kSplitKeys, "the keys of a tile are a warp's");
  // Whether each lane keeps numbers of the keys that ask it.
  static constexpr bool asks_its_own_lanes() {
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      for (int c = 0; c < F::kThreadKeys; ++c) {
        if (F::first_key(lane) + F::key_step(c) % kWarpSize >= kWarpSize) return false;
      }
    }
    return true;
  }

 public:
  // Keeps load(key) of all keys.
  template <class Load>
  WL_FN void read(const Load& load) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const T number = load(min(i * kWarpSize + int(F::lane()), kKeys - 1));
      memcpy(words_[i], &number, sizeof(T));
    }
  }
  // That of the thread's key c. All lanes must ask.
  WL_FN T of(int c) const {
    static_assert(asks_its_own_lanes(), "no key of a thread leaves the 32 of its step");
    const int step = F::key_step(c);
    unsigned words[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      words[w] =
          __shfl_sync(kAllLanes, words_[step / kWarpSize][w], F::first_key() + step % kWarpSize);
    }
    T number;
    memcpy(&number, words, sizeof(T));
    return number;
  }

 private:
  unsigned words_[kHeld][kWords];
};

}  // namespace warploom
