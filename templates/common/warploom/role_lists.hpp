// Where lists of each kind begin in a plan of two roles, in multiples of its CTAs: ROLE_OF_LISTS of
// scheduler/roles.py.
#pragma once

namespace warploom {

constexpr int kDecodeLists = 1;     // behind those of prefills; CTAs have both for their own
constexpr int kSharedPrefills = 2;  // for any CTA
constexpr int kSharedDecodes = 3;   // for CTAs that decode
constexpr int kRoleLists = 5;       // all

}  // namespace warploom
