// Where lists of each kind begin in a plan of two roles, in multiples of its CTAs: ROLE_OF_LISTS of
// scheduler/model/roles.py.
#pragma once

namespace warploom {

constexpr int kMostRounds = 4;  // of lists of whole prefills; the first are CTAs' own
constexpr int kPrefillLists = kMostRounds + 2;  // and behind rounds, long ends and short ones
constexpr int kDecodeLists = 1;     // behind those of prefills; CTAs have both for their own
constexpr int kSharedPrefills = 2;  // for any CTA: all that are not CTAs' own
constexpr int kSharedDecodes = kSharedPrefills + kPrefillLists - 1;  // for CTAs that decode
constexpr int kDecodeSlices = 3;  // of a CTA that decodes: its own, a long shared one and a short
constexpr int kRoleLists = kSharedDecodes + kDecodeSlices - 1;  // all

}  // namespace warploom
