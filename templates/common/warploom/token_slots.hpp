// Which slot of a rolling cache holds a token: the first `sinks` tokens stay where they are, later
// ones go around a ring of `window` slots. Lists of rolling caches hold positions; those of other
// formats hold block numbers, which are used as they are. Included behind a definition of WL_FN.
#pragma once

namespace warploom {

template <class Config, class = void>
struct TokenSlots {
  WL_FN static int of(int block) { return block; }
};

template <class Config>
struct TokenSlots<Config, decltype(void(Config::kWindow))> {
  WL_FN static int of(int position) {
    constexpr int kSinks = Config::kSinks, kWindow = Config::kWindow;
    if (position < kSinks + kWindow) return position;  // one below 0 names no token
    return kSinks + int(unsigned(position - kSinks) % unsigned(kWindow));
  }
};

}  // namespace warploom
