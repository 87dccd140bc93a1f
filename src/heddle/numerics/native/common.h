// What every file of operators shares: storage types, and passes over rows in parallel.
//
// Numbers are stored as double, float or bfloat16 and computed in `Wide<T>`: double for double, else float.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>

namespace heddle {

using at::Tensor;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <typename T>
struct WideOf {
    using type = T;
};
template <>
struct WideOf<at::BFloat16> {
    using type = float;
};
template <typename T>
using Wide = typename WideOf<T>::type;

inline float wide(float x) { return x; }
inline double wide(double x) { return x; }
inline float wide(at::BFloat16 x) {
    uint32_t bits = uint32_t(x.x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// Round to the storage type, to nearest even. Written so that loops of it become vector instructions.
template <typename T>
inline T narrow(Wide<T> x) {
    return x;
}
template <>
inline at::BFloat16 narrow<at::BFloat16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return at::BFloat16(uint16_t(x != x ? 0x7fc0 : rounded), at::BFloat16::from_bits());
}

// exp within 2 units in the last place, also of infinities and NaN, written so that loops of it become vector
// instructions: 2^n e^r with |r| <= ln(2) / 2, e^r by its series, and 2^n as a product of two powers, which reaches 0
// and infinity.
inline float power_of_two(int32_t n) { return __builtin_bit_cast(float, (n + 127) << 23); }
inline float fast_exp(float x) {
    const float low = x < -104.0f ? -104.0f : x, bounded = low > 89.0f ? 89.0f : low;
    const float shifted = bounded * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;  // rounded to an integer
    const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    const float high = (1.98412698e-4f * r + 1.38888889e-3f) * r + 8.33333333e-3f;
    const float p = ((((high * r + 4.16666667e-2f) * r + 1.66666667e-1f) * r + 0.5f) * r + 1.0f) * r + 1.0f;
    const int32_t k = int32_t(n), half = k >> 1;
    return p * power_of_two(half) * power_of_two(k - half);
}
inline double fast_exp(double x) { return std::exp(x); }

// Call f<T>() with the storage type of a tensor.
#define HEDDLE_DISPATCH(tensor, T, ...)                                                \
    switch ((tensor).scalar_type()) {                                                  \
        case at::kDouble: {                                                            \
            using T = double;                                                          \
            __VA_ARGS__;                                                               \
            break;                                                                     \
        }                                                                              \
        case at::kFloat: {                                                             \
            using T = float;                                                           \
            __VA_ARGS__;                                                               \
            break;                                                                     \
        }                                                                              \
        case at::kBFloat16: {                                                          \
            using T = at::BFloat16;                                                    \
            __VA_ARGS__;                                                               \
            break;                                                                     \
        }                                                                              \
        default:                                                                       \
            TORCH_CHECK(false, "dtype ", (tensor).scalar_type(), ": no C++ operator"); \
    }

// Rows in parallel, where a part has at least `GRAIN` elements.
constexpr int64_t GRAIN = 8192;

template <typename F>
void for_rows(int64_t rows, int64_t width, const F& f) {
    at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, width)), f);
}

// The backward passes here have no derivatives of their own.
inline void refuse_second_derivatives(const char* name) {
    TORCH_CHECK(!at::GradMode::is_enabled(), name,
                ": its C++ operator has no second derivatives; set HEDDLE_MACHINE=default");
}

}  // namespace heddle
