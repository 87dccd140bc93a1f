// Products of a few rows, in vectors of 64 bytes: 512 bits where the CPU has them, else as many as the compiler needs.
#pragma once
#include "common.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace heddle {

template <typename T> struct LanesOf { typedef T type __attribute__((vector_size(64))); };
template <typename T> using Lanes = typename LanesOf<T>::type;
template <typename T> constexpr int64_t LANES = 64 / sizeof(T);

template <typename T> inline Lanes<T> load(const T* from) {
    Lanes<T> lanes;
    std::memcpy(&lanes, from, 64);
    return lanes;
}

template <typename T> inline void store(T* to, Lanes<T> lanes) { std::memcpy(to, &lanes, 64); }

// Keeps in a register what several products use: GCC would read it again for each of them.
template <typename T> inline Lanes<T> load_once(const T* from) {
    Lanes<T> lanes = load(from);
#ifdef __AVX512F__
    asm("" : "+v"(lanes));
#endif
    return lanes;
}

template <typename T> inline T sum_lanes(Lanes<T> lanes) {
    T values[LANES<T>];
    std::memcpy(values, &lanes, 64);
    for (int64_t half = LANES<T> / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) values[i] += values[i + half];
    return values[0];
}

// The sums of four vectors, to[0] ... to[3].
template <typename T> inline void sum_four(Lanes<T> a, Lanes<T> b, Lanes<T> c, Lanes<T> d, T* to) {
    to[0] = sum_lanes<T>(a), to[1] = sum_lanes<T>(b), to[2] = sum_lanes<T>(c), to[3] = sum_lanes<T>(d);
}

#ifndef __clang__
template <> inline void sum_four<float>(Lanes<float> a, Lanes<float> b, Lanes<float> c, Lanes<float> d, float* to) {
    typedef int32_t Order __attribute__((vector_size(64)));
    typedef float Half __attribute__((vector_size(32)));
    typedef float Quarter __attribute__((vector_size(16)));
    constexpr Order low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}, high = low + 2;
    constexpr Order even = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, odd = even + 2;
    const Lanes<float> ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
    const Lanes<float> cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, high);
    const Lanes<float> abcd = __builtin_shuffle(ab, cd, even) + __builtin_shuffle(ab, cd, odd);
    Half halves[2];
    std::memcpy(halves, &abcd, 64);
    halves[0] += halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, halves, 32);
    quarters[0] += quarters[1];
    std::memcpy(to, quarters, 16);
}
#endif

// exp(x) for x <= 0, exactly 0 below -87: the polynomial of Cephes' expf.
inline Lanes<float> exponential(Lanes<float> x) {
    typedef int32_t Integers __attribute__((vector_size(64)));
    const Integers vanishes = x < -87.0f;
    x = vanishes ? Lanes<float>{} : x;
    const Lanes<float> power = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounded to an integer
    const Lanes<float> r = x - power * 0.693145752f - power * 1.42860677e-6f;
    Lanes<float> y = r * 1.98756915e-4f + 1.39819995e-3f;
    y = y * r + 8.33345191e-3f;
    y = y * r + 4.16657959e-2f;
    y = y * r + 1.66666655e-1f;
    y = y * r + 5.00000012e-1f;
    y = y * r * r + r + 1.0f;
    const Integers bits = (__builtin_convertvector(power, Integers) + 127) << 23;
    Lanes<float> scale;
    std::memcpy(&scale, &bits, 64);
    return vanishes ? Lanes<float>{} : y * scale;
}

inline Lanes<double> exponential(Lanes<double> x) {
    for (int64_t i = 0; i < LANES<double>; i++) x[i] = std::exp(x[i]);
    return x;
}

// Zeros that begin at a cache line: a vector of 64 bytes would else be read from two.
template <typename T> class Buffer {
  public:
    explicit Buffer(int64_t count) : memory(count + LANES<T>) {}
    T* data() { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64); }

  private:
    std::vector<T> memory;
};

constexpr int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

constexpr int64_t TILE_ROWS = 4;

// scores[k, m] = x[m] . y[k] for TILE_ROWS rows of x and K of y, `width` long, a multiple of the lanes.
// ahead: rows of y after which reading begins early, or 0.
template <int64_t K, typename T>
inline void multiply_tile(const T* x, const T* y, int64_t y_row, int64_t width, T* scores, int64_t score_row, int64_t ahead) {
    Lanes<T> sums[K][TILE_ROWS] = {};
    for (int64_t i = 0; i < width; i += LANES<T>) {
        Lanes<T> rows[TILE_ROWS];
#pragma GCC unroll 4
        for (int64_t m = 0; m < TILE_ROWS; m++) rows[m] = load_once(x + m * width + i);
#pragma GCC unroll 6
        for (int64_t k = 0; k < K; k++) {
            if (ahead) __builtin_prefetch(y + (k + ahead) * y_row + i, 0, 2);
            const Lanes<T> row = load_once(y + k * y_row + i);
#pragma GCC unroll 4
            for (int64_t m = 0; m < TILE_ROWS; m++) sums[k][m] += rows[m] * row;
        }
    }
#pragma GCC unroll 6
    for (int64_t k = 0; k < K; k++) sum_four<T>(sums[k][0], sums[k][1], sums[k][2], sums[k][3], scores + k * score_row);
}

// sums[m] = sums[m] rescale[m] + sum over k of weights[k, m] y[k], for TILE_ROWS rows of N vectors.
template <int64_t N, typename T>
inline void accumulate_tile(const T* weights, int64_t weight_row, const T* rescale, int64_t count, const T* y, int64_t y_row, T* sums, int64_t sum_row) {
    Lanes<T> totals[TILE_ROWS][N];
#pragma GCC unroll 4
    for (int64_t m = 0; m < TILE_ROWS; m++)
#pragma GCC unroll 6
        for (int64_t n = 0; n < N; n++) totals[m][n] = load(sums + m * sum_row + n * LANES<T>) * rescale[m];
    for (int64_t k = 0; k < count; k++) {
        Lanes<T> row[N];
#pragma GCC unroll 6
        for (int64_t n = 0; n < N; n++) row[n] = load_once(y + k * y_row + n * LANES<T>);
#pragma GCC unroll 4
        for (int64_t m = 0; m < TILE_ROWS; m++)
#pragma GCC unroll 6
            for (int64_t n = 0; n < N; n++) totals[m][n] += weights[k * weight_row + m] * row[n];
    }
#pragma GCC unroll 4
    for (int64_t m = 0; m < TILE_ROWS; m++)
#pragma GCC unroll 6
        for (int64_t n = 0; n < N; n++) store<T>(sums + m * sum_row + n * LANES<T>, totals[m][n]);
}

// The same for any multiple of TILE_ROWS rows and of the lanes, by strips of y that fit the first cache.
template <typename T>
void accumulate(const T* weights, int64_t weight_row, const T* rescale, int64_t count, const T* y, int64_t y_row, T* sums, int64_t rows, int64_t sum_row) {
    for (int64_t i = 0, vectors; i < sum_row; i += vectors * LANES<T>) {
        vectors = sum_row - i >= 6 * LANES<T> ? 6 : sum_row - i >= 2 * LANES<T> ? 2 : 1;
        for (int64_t m = 0; m < rows; m += TILE_ROWS) {
            const auto tile = vectors == 6 ? accumulate_tile<6, T> : vectors == 2 ? accumulate_tile<2, T> : accumulate_tile<1, T>;
            tile(weights + m, weight_row, rescale + m, count, y + i, y_row, sums + m * sum_row + i, sum_row);
        }
    }
}

}  // namespace heddle
