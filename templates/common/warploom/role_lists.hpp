// Where lists of each kind begin in a plan of two roles, in multiples of its CTAs: ROLE_OF_LISTS of
// scheduler/model/roles.py.
#pragma once

namespace warploom {

constexpr int kMostRounds = 4;      // of lists of whole prefills; the first are CTAs' own
constexpr int kDecodeLists = 1;     // behind those of prefills; CTAs have both for their own
constexpr int kSharedPrefills = 2;  // for any CTA: the other rounds, long ends and short ones
constexpr int kSharedDecodes = kSharedPrefills + kMostRounds - 1 + 2;  // for CTAs that decode
constexpr int kRoleLists = kSharedDecodes + 2;                         // all

}  // namespace warploom
