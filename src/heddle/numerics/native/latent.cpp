// Absorbed latent attention of a few queries, in one reading of the latents; see `heddle.numerics.attention.latent`.
//
// Threads take slices of the context. Each keeps, per query, the greatest score so far, the sum of the weights and the
// weighted sum of the latents (Milakov & Gimelshein 2018), and what the slices have kept is combined at the end.
#include "common.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace heddle {

// Products of a few rows, in vectors of 64 bytes: 512 bits where the CPU has them, else as many as the compiler needs.

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

constexpr int64_t BLOCK = 96, TILE_KEYS = 6;  // keys

struct LatentSizes {
    int64_t batch, heads, queries, keys, rank, nope, rope, value, latent_row, latent_batch;
    double scale;
};

// Queries of one head in the latent space, times the scale: rows of `width`, set to zero before.
template <typename T>
void absorb(const LatentSizes& n, const T* q_nope, const T* q_rope, const T* up, Wide<T>* rows, int64_t width) {
    for (int64_t t = 0; t < n.queries; t++) {
        Wide<T>* row = rows + t * width;
        for (int64_t i = 0; i < n.nope; i++) {
            const Wide<T> factor = wide(q_nope[t * n.nope + i]) * Wide<T>(n.scale);
#pragma omp simd
            for (int64_t j = 0; j < n.rank; j++) row[j] += factor * wide(up[i * n.rank + j]);
        }
        for (int64_t i = 0; i < n.rope; i++) row[n.rank + i] = wide(q_rope[t * n.rope + i]) * Wide<T>(n.scale);
    }
}

template <typename T>
void attend(const LatentSizes& n, const T* q_nope, const T* q_rope, const T* latents, const T* k_up, const T* v_up, const bool* visible, T* out) {
    using W = Wide<T>;
    constexpr W INFINITE = std::numeric_limits<W>::infinity();
    const int64_t rows = n.heads * n.queries, tiled_rows = round_up(rows, TILE_ROWS), score_row = round_up(rows, LANES<W>);
    const int64_t width = round_up(n.rank + n.rope, LANES<W>), sum_row = round_up(n.rank, LANES<W>);
    const int64_t threads = n.batch % at::get_num_threads() ? at::get_num_threads() : 1;
    const int64_t slices = std::max<int64_t>(1, std::min(threads, n.keys / BLOCK));
    const int64_t slice = round_up((n.keys + slices - 1) / slices, BLOCK);
    const bool in_place = std::is_same_v<T, W> && !visible && width == n.rank + n.rope;

    Buffer<W> queries(n.batch * tiled_rows * width), all_sums(n.batch * slices * tiled_rows * sum_row);
    std::vector<W> all_greatest(n.batch * slices * score_row, -INFINITE), all_masses(n.batch * slices * score_row);
    W *q = queries.data(), *kept_sums = all_sums.data(), *kept_greatest = all_greatest.data(), *kept_masses = all_masses.data();

    at::parallel_for(0, n.batch * n.heads, 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const int64_t batch = i / n.heads, head = i % n.heads;
            W* head_rows = q + (batch * tiled_rows + head * n.queries) * width;
            absorb<T>(n, q_nope + i * n.queries * n.nope, q_rope + i * n.queries * n.rope, k_up + head * n.nope * n.rank, head_rows, width);
        }
    });

    at::parallel_for(0, n.batch * slices, 1, [&](int64_t first, int64_t last) {
        Buffer<W> copies(in_place ? 0 : BLOCK * width), block_scores(BLOCK * score_row), factors(score_row);
        W *copy = copies.data(), *scores = block_scores.data(), *rescale = factors.data();
        for (int64_t i = first; i < last; i++) {
            const int64_t batch = i / slices, begin = i % slices * slice, end = std::min(n.keys, begin + slice);
            const W* x = q + batch * tiled_rows * width;
            W *greatest = kept_greatest + i * score_row, *masses = kept_masses + i * score_row;
            for (int64_t start = begin; start < end; start += BLOCK) {
                const int64_t count = std::min(BLOCK, end - start);
                const T* block = latents + batch * n.latent_batch + start * n.latent_row;
                const W* keys = reinterpret_cast<const W*>(block);
                int64_t key_row = n.latent_row;
                // visible[t, k] of the block
                const bool* sees = visible ? visible + batch * n.queries * n.keys + start : nullptr;
                if (!in_place || count < BLOCK) {
                    if (in_place) copies = Buffer<W>(BLOCK * width), copy = copies.data();
                    keys = copy, key_row = width;
                    for (int64_t k = 0; k < BLOCK; k++) {
                        bool seen = k < count && !sees;
                        for (int64_t t = 0; t < n.queries && k < count && sees; t++) seen |= sees[t * n.keys + k];
                        // What no query sees may be NaN.
                        for (int64_t j = 0; j < n.rank + n.rope; j++) copy[k * width + j] = seen ? wide(block[k * n.latent_row + j]) : W(0);
                    }
                }
                for (int64_t k = 0; k < BLOCK; k += TILE_KEYS)
                    for (int64_t m = 0; m < tiled_rows; m += TILE_ROWS)
                        multiply_tile<TILE_KEYS>(x + m * width, keys + k * key_row, key_row, width, scores + k * score_row + m, score_row, m ? 0 : BLOCK);
                for (int64_t k = 0; k < count && sees; k++)
                    for (int64_t m = 0; m < rows; m++)
                        if (!sees[m % n.queries * n.keys + k]) scores[k * score_row + m] = -INFINITE;
                std::fill(scores + count * score_row, scores + BLOCK * score_row, -INFINITE);
                for (int64_t m = 0; m < score_row; m += LANES<W>) {
                    const Lanes<W> before = load(greatest + m);
                    Lanes<W> most = before;
                    for (int64_t k = 0; k < BLOCK; k++) {
                        const Lanes<W> score = load(scores + k * score_row + m);
                        most = score > most ? score : most;
                    }
                    const Lanes<W> finite = most == -INFINITE ? Lanes<W>{} : most;  // a query that has seen no key so far
                    const Lanes<W> factor = exponential(before - finite);
                    Lanes<W> mass = load(masses + m) * factor;
                    for (int64_t k = 0; k < BLOCK; k++) {
                        const Lanes<W> weight = exponential(load(scores + k * score_row + m) - finite);
                        store<W>(scores + k * score_row + m, weight);
                        mass += weight;
                    }
                    store<W>(greatest + m, most), store<W>(masses + m, mass), store<W>(rescale + m, factor);
                }
                accumulate(scores, score_row, rescale, count, keys, key_row, kept_sums + i * tiled_rows * sum_row, tiled_rows, sum_row);
            }
        }
    });

    at::parallel_for(0, n.batch * n.heads, 1, [&](int64_t first, int64_t last) {
        std::vector<W> mean(n.rank);
        for (int64_t i = first; i < last; i++) {
            const int64_t batch = i / n.heads, head = i % n.heads;
            const T* up = v_up + head * n.value * n.rank;
            for (int64_t t = 0; t < n.queries; t++) {
                const int64_t row = head * n.queries + t;
                W most = -INFINITE, mass = 0;
                for (int64_t j = batch * slices; j < (batch + 1) * slices; j++) most = std::max(most, kept_greatest[j * score_row + row]);
                std::fill(mean.begin(), mean.end(), W(0));
                for (int64_t j = batch * slices; j < (batch + 1) * slices; j++) {
                    const W slice_most = kept_greatest[j * score_row + row];
                    const W weight = slice_most == -INFINITE ? W(0) : std::exp(slice_most - most);
                    const W* sums = kept_sums + (j * tiled_rows + row) * sum_row;
                    mass += weight * kept_masses[j * score_row + row];
#pragma omp simd
                    for (int64_t r = 0; r < n.rank; r++) mean[r] += weight * sums[r];
                }
                for (int64_t v = 0; v < n.value; v++) {
                    W y = 0;
#pragma omp simd reduction(+ : y)
                    for (int64_t r = 0; r < n.rank; r++) y += wide(up[v * n.rank + r]) * mean[r];
                    out[(i * n.queries + t) * n.value + v] = narrow<T>(mass == 0 ? W(0) : y / mass);
                }
            }
        }
    });
}

Tensor latent_decode(const Tensor& q_nope, const Tensor& q_rope, const Tensor& latents, const Tensor& k_up, const Tensor& v_up,
                     const optional<Tensor>& visible, double scale) {
    const Tensor nope = q_nope.contiguous(), rope = q_rope.contiguous(), k = k_up.contiguous(), v = v_up.contiguous();
    const Tensor c = latents.stride(3) == 1 ? latents : latents.contiguous();
    const int64_t heads = nope.size(1);
    const LatentSizes sizes{nope.size(0), heads, nope.size(2), c.size(2), k.size(1), nope.size(3), rope.size(3), v.size(0) / heads, c.stride(2), c.stride(0), scale};
    Tensor mask, out = at::empty({sizes.batch, heads, sizes.queries, sizes.value}, nope.options());
    if (visible) mask = visible->expand({sizes.batch, sizes.queries, sizes.keys}).contiguous();
    HEDDLE_DISPATCH(c, T, attend<T>(sizes, nope.const_data_ptr<T>(), rope.const_data_ptr<T>(), c.const_data_ptr<T>(), k.const_data_ptr<T>(),
        v.const_data_ptr<T>(), mask.defined() ? mask.const_data_ptr<bool>() : nullptr, out.data_ptr<T>()))
    return out;
}

TORCH_LIBRARY_FRAGMENT(heddle, m) {
    m.def("latent_decode(Tensor q_nope, Tensor q_rope, Tensor latents, Tensor k_up, Tensor v_up, Tensor? visible, float scale) -> Tensor");
    m.impl("latent_decode", torch::dispatch(c10::DispatchKey::CPU, &latent_decode));
}

}  // namespace heddle
