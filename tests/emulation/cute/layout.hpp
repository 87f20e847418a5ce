// Names of CuTe that headers mention and emulated kernels do not use.
#pragma once

#include <type_traits>

namespace cute {

using std::is_same_v;
template <bool kFirst, class A, class B>
using conditional_t = std::conditional_t<kFirst, A, B>;

template <int>
struct Int;
using _1 = Int<1>;
template <class...>
struct Shape;
template <class...>
struct Stride;
template <class...>
struct Layout;
template <int, int, int>
struct Swizzle;
template <class A, class B>
A composition(A, B);

template <int>
void cp_async_wait();
void cp_async_fence();
template <class T>
unsigned cast_smem_ptr_to_uint(T*);

}  // namespace cute
