// Where lists of each kind begin in a plan of two roles, in multiples of its CTAs: ROLE_OF_LISTS of
// scheduler/model/roles.py.
#pragma once

namespace warploom {

constexpr int kMostRounds = 4;  // of lists of whole prefills; the first are CTAs' own
constexpr int kEnds = 3;        // of lists that are halved from each to the next, at most
constexpr int kPrefillLists = kMostRounds + kEnds;
constexpr int kDecodeLists = 1;     // behind those of prefills; CTAs have both for their own
constexpr int kSharedPrefills = 2;  // for any CTA: all that are not CTAs' own
constexpr int kSharedDecodes = kSharedPrefills + kPrefillLists - 1;  // for CTAs that decode
constexpr int kDecodeSlices = 1 + kEnds;  // of a CTA that decodes: its own, and shared ends
constexpr int kRoleLists = kSharedDecodes + kDecodeSlices - 1;  // all

}  // namespace warploom
