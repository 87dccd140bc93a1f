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

template <typename T> struct WideOf { using type = T; };
template <> struct WideOf<at::BFloat16> { using type = float; };
template <typename T> using Wide = typename WideOf<T>::type;

inline float wide(float x) { return x; }
inline double wide(double x) { return x; }
inline float wide(at::BFloat16 x) {
    uint32_t bits = uint32_t(x.x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// Round to the storage type, to nearest even. Written so that loops of it become vector instructions.
template <typename T> inline T narrow(Wide<T> x) { return x; }
template <> inline at::BFloat16 narrow<at::BFloat16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return at::BFloat16(uint16_t(x != x ? 0x7fc0 : rounded), at::BFloat16::from_bits());
}

// exp within 2 units in the last place, also of infinities and NaN, written so that loops of it become vector instructions.
inline float fast_exp(float x) {
    const float t = x * 1.44269504f + 12582912.0f, n = t - 12582912.0f;  // rounded to an integer
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.98412698e-4f;
    for (float c : {1.38888889e-3f, 8.33333333e-3f, 4.16666667e-2f, 1.66666667e-1f, 0.5f, 1.0f, 1.0f}) p = p * r + c;
    const int32_t k = int32_t(x < -104.0f ? -150.0f : x > 89.0f ? 129.0f : x != x ? 0.0f : n), half = k >> 1;
    const int32_t bits[2] = {(half + 127) << 23, (k - half + 127) << 23};
    float scale[2];
    std::memcpy(scale, bits, 8);
    return x < -104.0f ? 0.0f : x > 89.0f ? INFINITY : p * scale[0] * scale[1];
}
inline double fast_exp(double x) { return std::exp(x); }

// Call f<T>() with the storage type of a tensor.
#define HEDDLE_DISPATCH(tensor, T, ...)                                               \
    switch ((tensor).scalar_type()) {                                                 \
        case at::kDouble: { using T = double; __VA_ARGS__; break; }                   \
        case at::kFloat: { using T = float; __VA_ARGS__; break; }                     \
        case at::kBFloat16: { using T = at::BFloat16; __VA_ARGS__; break; }           \
        default: TORCH_CHECK(false, "dtype ", (tensor).scalar_type(), ": no C++ operator"); \
    }

// Rows in parallel, where a part has at least `GRAIN` elements.
constexpr int64_t GRAIN = 8192;

template <typename F> void for_rows(int64_t rows, int64_t width, const F& f) {
    at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, width)), f);
}

// The backward passes here have no derivatives of their own.
inline void refuse_second_derivatives(const char* name) {
    TORCH_CHECK(!at::GradMode::is_enabled(), name, ": its C++ operator has no second derivatives; set HEDDLE_MACHINE=default");
}

}  // namespace heddle
