// Where lists of each kind begin in a plan of two roles, in multiples of its number of CTAs:
// ROLE_OF_LISTS of scheduler/model/roles.py.
#pragma once

namespace warploom {

constexpr int kMostRounds = 4;  // rounds of lists of whole prefills; CTAs own the first round
constexpr int kEnds = 3;        // most lengths of shared lists, each half of the one before
constexpr int kPrefillLists = kMostRounds + kEnds;
constexpr int kDecodeLists = 1;     // decode lists, behind prefill lists; CTAs own both
constexpr int kSharedPrefills = 2;  // prefill lists that no CTA owns: any CTA claims them
constexpr int kSharedDecodes = kSharedPrefills + kPrefillLists - 1;  // decoding CTAs claim these
constexpr int kDecodeSlices = 1 + kEnds;  // for each decoding CTA: its own, and shared ends
constexpr int kRoleLists = kSharedDecodes + kDecodeSlices - 1;  // of all kinds

}  // namespace warploom
