// Recurrences with a decay for each token, chunk by chunk, with the state of one head in a core's cache.
//
//     the delta rule    S_t = (I - beta_t k_t k_t^T) Diag(a_t) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t
//     decaying sums     S_t = Diag(a_t) S_{t-1} + k_t v_t^T,                                 o_t = S_t^T q_t
//
// a_t is one number or one for each channel of the key, and 0 where a document begins. For the tokens of a chunk, with
// F_i = a_1 ... a_i, E_j = a_{j+1} ... a_last and D_ij = a_{j+1} ... a_i, products of decays and never quotients:
//
//     X = V - (F K) S - tril(K K^T . D, -1) N,   N = beta X  (sums: N = V),   O = (F Q) S + (Q K^T . D) N
//     S' = F_last S + (E K)^T N
//
// Rows of q and of k stand in one matrix [2 C, d_k]: the state and the keys multiply both. In sums the second half of what
// is computed from it stays 0. Widths are padded with zeros to whole vectors. The forward pass keeps X and the state
// before every KEPT-th chunk; the backward pass computes the other states again, transposed.
#include "common.h"

#include <vector>

namespace heddle {
namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, WIDEST = 4;  // of a vector; most vectors of a row in the registers of a product
#else
constexpr int BYTES = 32, WIDEST = 2;
#endif
constexpr int C = 16;    // tokens of a chunk
constexpr int KEPT = 4;  // chunks from one kept state to the next

template <typename T> struct Vectors { typedef T type __attribute__((vector_size(BYTES))); };
template <typename T> using Vector = typename Vectors<T>::type;
template <typename T> constexpr int LANES = BYTES / sizeof(T);
template <typename T> inline Vector<T>& at(T* x) { return *reinterpret_cast<Vector<T>*>(x); }
template <typename T> inline const Vector<T>& at(const T* x) { return *reinterpret_cast<const Vector<T>*>(x); }

inline int padded(int64_t width) { return int((width + 15) / 16 * 16); }

template <typename T> inline T sum_lanes(Vector<T> x) {
    T total = 0;
    for (int lane = 0; lane < LANES<T>; lane++) total += x[lane];
    return total;
}

// A matrix whose element (i, j) is data[i * row + j * column].
template <typename T> struct Matrix {
    const T* data;
    int64_t row, column = 1;
};

// M rows and N vectors of y = a b, or of y += a b, for each M of the rows.
template <typename T, int M, int N>
inline void product_columns(int rows, int depth, Matrix<T> a, const T* b, int64_t width, T* y, int64_t y_width, bool adds) {
    constexpr int L = LANES<T>;
    for (int first = 0; first < rows; first += M, y += M * y_width) {
        const T* factors = a.data + first * a.row;
        Vector<T> sums[M][N] = {};
        for (int p = 0; p < depth; p++) {
#pragma GCC unroll 8
            for (int i = 0; i < M; i++)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) sums[i][n] += at(b + p * width + n * L) * factors[i * a.row + p * a.column];
        }
#pragma GCC unroll 8
        for (int i = 0; i < M; i++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                Vector<T>& target = at(y + i * y_width + n * L);
                target = adds ? target + sums[i][n] : sums[i][n];
            }
    }
}

// y [rows, columns] = a [rows, depth] b [depth, columns], or y += a b. Rows of b and y are contiguous; sizes are `padded`.
template <typename T>
void product(int rows, int columns, int depth, Matrix<T> a, const T* b, int64_t width, T* y, int64_t y_width, bool adds) {
    constexpr int L = LANES<T>;
    int n = 0;
    for (; n + WIDEST * L <= columns; n += WIDEST * L)
        product_columns<T, 4, WIDEST>(rows, depth, a, b + n, width, y + n, y_width, adds);
    for (; n < columns; n += L) product_columns<T, 8, 1>(rows, depth, a, b + n, width, y + n, y_width, adds);
}

// y [columns, rows] = x [rows, columns] transposed; both sizes are `padded`.
template <typename T> void transpose(int rows, int columns, const T* x, int64_t width, T* y, int64_t y_width) {
    constexpr int L = LANES<T>;
    using Lane = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
    typedef Lane Lanes __attribute__((vector_size(BYTES)));
    for (int i = 0; i < rows; i += L)
        for (int j = 0; j < columns; j += L) {
            Vector<T> tile[L];
            for (int r = 0; r < L; r++) tile[r] = at(x + (i + r) * width + j);
#pragma GCC unroll 4
            for (int half = 1; half < L; half *= 2) {  // exchange two corners of each block [2 half, 2 half]
                Lanes low, high;
                for (int lane = 0; lane < L; lane++) {
                    low[lane] = lane & half ? L + lane - half : lane;
                    high[lane] = lane & half ? L + lane : lane + half;
                }
#pragma GCC unroll 16
                for (int r = 0; r < L; r++)
                    if (!(r & half)) {
                        const Vector<T> first = tile[r], second = tile[r + half];
                        tile[r] = __builtin_shuffle(first, second, low);
                        tile[r + half] = __builtin_shuffle(first, second, high);
                    }
            }
            for (int r = 0; r < L; r++) at(y + (j + r) * y_width + i) = tile[r];
        }
}

// Rows [T, width] of one head of a tensor [B, H, T, width] whose last stride is 1.
template <typename T> struct Rows {
    T* data = nullptr;
    int64_t stride = 0, width = 0;

    Rows() = default;
    Rows(const Tensor& x, int64_t b, int64_t head)
        : data(x.data_ptr<T>() + b * x.stride(0) + head * x.stride(1)), stride(x.stride(2)), width(x.size(3)) {}
    T* operator[](int64_t i) const { return data + i * stride; }

    // `count` rows from `begin` on, padded with zeros to [rows, columns].
    void read(int64_t begin, int count, T* to, int rows, int columns) const {
        std::memset(to, 0, sizeof(T) * rows * columns);
        for (int i = 0; i < count; i++) std::memcpy(to + i * columns, (*this)[begin + i], width * sizeof(T));
    }
    void write(int64_t begin, int count, const T* from, int columns) const {
        for (int i = 0; i < count; i++) std::memcpy((*this)[begin + i], from + i * columns, width * sizeof(T));
    }
};

// The tensors of a call: q, k [B, G, T, d_k], v [B, H, T, d_v], decay [B, H, T, 1|d_k], beta [B, H, T, 1] or undefined.
// kept [B, H, n, K V] and values (X, or v) [B, H, T, d_v] are for the backward pass.
struct Call { Tensor q, k, v, decay, beta, kept, values; };

// One head of a call, and what both passes compute of one of its chunks.
template <typename T> class Head {
  public:
    static constexpr int L = LANES<T>;
    const int64_t length;
    const int d_k, K, V;  // K, V: d_k and d_v padded
    const bool is_delta, per_channel;
    const int half;  // rows of q and k, or of q alone
    const Rows<T> q, k, decays, betas, kept;
    int64_t begin = 0;
    int tokens = 0;
    T beta[C];
    T *qk, *decayed, *decay, *from_start, *to_end, *late_keys, *turned, *pairs, *pair_decay, *x, *written;

    Head(const Call& c, int64_t b, int64_t h)
        : length(c.v.size(2)), d_k(int(c.k.size(3))), K(padded(d_k)), V(padded(c.v.size(3))), is_delta(c.beta.defined()),
          per_channel(c.decay.size(3) > 1), half(is_delta ? 2 * C : C), q(c.q, b, h / (c.v.size(1) / c.k.size(1))),
          k(c.k, b, h / (c.v.size(1) / c.k.size(1))), decays(c.decay, b, h),
          betas(is_delta ? Rows<T>(c.beta, b, h) : Rows<T>()), kept(c.kept.defined() ? Rows<T>(c.kept, b, h) : Rows<T>()) {
        for (T** rows : {&decay, &from_start, &to_end, &late_keys}) *rows = take(C * K);
        for (T** rows : {&qk, &decayed, &turned}) *rows = take(2 * C * K);
        pairs = take(2 * C * C);
        pair_decay = take(C * C);
        x = take(C * V);
        written = take(C * V);
    }

    // Memory that lives as long as this, aligned to vectors and set to zeros.
    T* take(int64_t elements) {
        memory.emplace_back(elements * sizeof(T) + BYTES, 0);
        return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.back().data()) + BYTES - 1) / BYTES * BYTES);
    }

    // Keys and decays of a chunk (after the last token 0 and 1), `values` of its tokens into x, and beta x into written.
    void read(int64_t number, const Rows<T>& values) {
        begin = number * C;
        tokens = int(std::min<int64_t>(C, length - begin));
        k.read(begin, tokens, qk + C * K, C, K);
        values.read(begin, tokens, x, C, V);
        for (int i = 0; i < C; i++) {
            T* row = decay + i * K;
            std::fill(row, row + K, i < tokens && !per_channel ? *decays[begin + i] : T(1));
            if (i < tokens && per_channel) std::memcpy(row, decays[begin + i], d_k * sizeof(T));
            beta[i] = i < tokens && is_delta ? *betas[begin + i] : T(1);
            for (int n = 0; n < V; n += L) at(written + i * V + n) = at(x + i * V + n) * beta[i];
        }
        for (int d = 0; d < K; d += L) {
            Vector<T> product = at(decay + d), one = Vector<T>{} + T(1);
            at(from_start + d) = product;
            for (int i = 1; i < C; i++) at(from_start + i * K + d) = product *= at(decay + i * K + d);
            for (int j = C - 1; j >= 0; j--) {
                at(to_end + j * K + d) = one;
                at(late_keys + j * K + d) = one * at(qk + (C + j) * K + d);
                one *= at(decay + j * K + d);
            }
        }
    }

    // Q K^T . D and K K^T . D [2 C, C], and F Q and F K.
    void pair() {
        q.read(begin, tokens, qk, C, K);
        for (int i = 0; i < half; i++)
            for (int d = 0; d < K; d += L) at(decayed + i * K + d) = at(qk + i * K + d) * at(from_start + i % C * K + d);
        transpose(C, K, qk + C * K, K, turned, C);
        if (per_channel) return pair_channels();
        product<T>(half, C, K, {qk, K}, turned, C, pairs, C, false);
        for (int i = 0; i < C; i++)
            for (int j = 0; j < C; j++) {
                const T number = j > i ? T(0) : j == i ? T(1) : pair_decay[(i - 1) * C + j] * decay[i * K];
                pair_decay[i * C + j] = number;
                pairs[i * C + j] *= number;
                pairs[(C + i) * C + j] *= j == i ? T(0) : number;
            }
    }

    // S = F_last S for a state [K, V].
    void decay_state(T* state) const {
        for (int d = 0; d < K; d++)
            for (int n = 0; n < V; n += L) at(state + d * V + n) *= from_start[(C - 1) * K + d];
    }

  private:
    std::vector<std::vector<char>> memory;

    // With a decay for each channel: keys that decay from token to token, each in a lane of vectors.
    void pair_channels() {
        T* keys = turned + C * K;
        std::memset(keys, 0, C * K * sizeof(T));
        for (int i = 0; i < C; i++) {
            alignas(BYTES) T is_new[C] = {};
            is_new[i] = 1;
            Vector<T> query_sums[2][C / L] = {}, key_sums[2][C / L] = {};  // of even and of odd channels
            for (int d = 0; d < K; d += 2)
#pragma GCC unroll 2
                for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
                    for (int n = 0; n < C / L; n++) {
                        const int lane = (d + odd) * C + n * L;
                        Vector<T>& key = at(keys + lane);
                        key = key * decay[i * K + d + odd] + at(turned + lane) * at(is_new + n * L);
                        query_sums[odd][n] += key * qk[i * K + d + odd];
                        key_sums[odd][n] += key * qk[(C + i) * K + d + odd];
                    }
            for (int n = 0; n < C / L; n++) {
                at(pairs + i * C + n * L) = query_sums[0][n] + query_sums[1][n];
                at(pairs + (C + i) * C + n * L) = key_sums[0][n] + key_sums[1][n];
            }
            pairs[(C + i) * C + i] = 0;
        }
    }
};

template <typename T> void forward_head(const Call& call, const Tensor& out, const Tensor& after, int64_t b, int64_t h) {
    constexpr int L = LANES<T>;
    Head<T> head(call, b, h);
    const int K = head.K, V = head.V;
    const Rows<T> v(call.v, b, h), y(out, b, h), state(after, b, h);
    T *S = head.take(K * V), *read = head.take(2 * C * V);
    state.read(0, head.d_k, S, K, V);
    for (int64_t number = 0; number * C < head.length; number++) {
        if (head.kept.data && number % KEPT == 0) std::memcpy(head.kept[number / KEPT], S, sizeof(T) * K * V);
        head.read(number, v);
        head.pair();
        product<T>(head.half, V, K, {head.decayed, K}, S, V, read, V, false);
        for (int i = 0; i < C; i++)
            for (int n = 0; n < V; n += L) {
                Vector<T> row = at(head.x + i * V + n) - at(read + (C + i) * V + n);
                for (int j = 0; head.is_delta && j < i; j++)
                    row -= at(head.written + j * V + n) * head.pairs[(C + i) * C + j];
                at(head.x + i * V + n) = row;
                at(head.written + i * V + n) = row * head.beta[i];
            }
        product<T>(C, V, C, {head.pairs, C}, head.written, V, read, V, true);
        head.decay_state(S);
        product<T>(K, V, C, {head.late_keys, 1, K}, head.written, V, S, V, true);
        y.write(head.begin, head.tokens, read, V);
        if (head.is_delta && head.kept.data) Rows<T>(call.values, b, h).write(head.begin, head.tokens, head.x, V);
    }
    state.write(0, head.d_k, S, V);
}

// The gradients of a call by head: q and k [B, H, T, d_k]. state: first that of the state after the last token.
struct Gradients { Tensor q, k, v, decay, beta, state; };

template <typename T> class BackwardHead : Head<T> {
    using Base = Head<T>;
    using Base::K, Base::V, Base::L, Base::half, Base::qk, Base::decayed, Base::decay, Base::from_start, Base::to_end,
        Base::late_keys, Base::turned, Base::pairs, Base::pair_decay, Base::x, Base::written, Base::beta, Base::begin,
        Base::tokens, Base::kept, Base::take;
    // Gradients end in _up. up: of O, then minus those of V. late_up: of E K. rows_up: of F Q and F K. qk_up: of q and k.
    T *states, *up, *v_up, *state_up, *state_up_turned, *written_turned, *pairs_up, *rows_up, *late_up, *qk_up, *decay_up;
    T beta_up[C];

  public:
    BackwardHead(const Call& call, int64_t b, int64_t h) : Base(call, b, h) {
        states = take(KEPT * K * V);
        for (T** rows : {&state_up, &state_up_turned}) *rows = take(K * V);
        for (T** rows : {&v_up, &written_turned}) *rows = take(C * V);
        for (T** rows : {&rows_up, &qk_up}) *rows = take(2 * C * K);
        for (T** rows : {&late_up, &decay_up}) *rows = take(C * K);
        up = take(2 * C * V);
        pairs_up = take(2 * C * C);
    }

    void run(const Call& call, const Tensor& out_up, const Gradients& to, int64_t b, int64_t h) {
        const Rows<T> values(call.values, b, h), o(out_up, b, h), state(to.state, b, h), to_q(to.q, b, h), to_k(to.k, b, h);
        const Rows<T> to_v(to.v, b, h), to_decay(to.decay, b, h), to_beta = this->is_delta ? Rows<T>(to.beta, b, h) : Rows<T>();
        state.read(0, this->d_k, state_up, K, V);
        const int64_t chunks = (this->length + C - 1) / C;
        for (int64_t group = (chunks - 1) / KEPT; group >= 0; group--) {
            const int64_t first = group * KEPT, last = std::min(chunks, first + KEPT) - 1;
            transpose(K, V, kept[group], V, states, K);
            for (int64_t number = first; number < last; number++) {
                this->read(number, values);
                T *before = states + (number - first) * K * V, *after = before + K * V;
                for (int n = 0; n < V; n++)
                    for (int d = 0; d < K; d += L)
                        at(after + n * K + d) = at(before + n * K + d) * at(from_start + (C - 1) * K + d);
                product<T>(V, K, C, {written, 1, V}, late_keys, K, after, K, true);
            }
            for (int64_t number = last; number >= first; number--) {
                this->read(number, values);
                this->pair();
                o.read(begin, tokens, up, C, V);
                step(states + (number - first) * K * V);
                to_q.write(begin, tokens, qk_up, K);
                to_k.write(begin, tokens, qk_up + C * K, K);
                to_v.write(begin, tokens, v_up, V);
                to_decay.write(begin, tokens, decay_up, K);
                to_beta.write(begin, this->is_delta ? tokens : 0, beta_up, 1);
            }
        }
        state.write(0, this->d_k, state_up, V);
    }

  private:
    // The gradients of one chunk, from the transposed state before it.
    void step(const T* S) {
        transpose(K, V, state_up, V, state_up_turned, K);
        transpose(C, V, written, V, written_turned, C);
        product<T>(C, V, C, {pairs, 1, C}, up, V, v_up, V, false);
        product<T>(C, V, K, {late_keys, K}, state_up, V, v_up, V, true);
        T* solved = up + C * V;
        for (int i = C - 1; this->is_delta && i >= 0; i--) {
            Vector<T> dot = {};
            for (int n = 0; n < V; n += L) {
                Vector<T> row = at(v_up + i * V + n);
                for (int j = i + 1; j < C; j++) row += at(solved + j * V + n) * pairs[(C + j) * C + i];
                dot += row * at(x + i * V + n);
                at(v_up + i * V + n) = row *= beta[i];
                at(solved + i * V + n) = -row;
            }
            beta_up[i] = sum_lanes<T>(dot);
        }
        product<T>(half, C, V, {up, V}, written_turned, C, pairs_up, C, false);
        product<T>(half, K, V, {up, V}, S, K, rows_up, K, false);
        product<T>(C, K, V, {written, V}, state_up_turned, K, late_up, K, false);
        through_decays(S);
        if (this->per_channel) through_channel_pairs();
        else through_head_pairs();
        this->decay_state(state_up);
        product<T>(K, V, half, {decayed, 1, K}, up, V, state_up, V, true);
    }

    // Through F and E: log a_t stands in each F_i with i >= t, and in each E_j with j < t.
    void through_decays(const T* S) {
        for (int d = 0; d < K; d += L) {
            Vector<T> later = {}, earlier = {};
            for (int n = 0; n < V; n++) later += at(S + n * K + d) * at(state_up_turned + n * K + d);
            later *= at(from_start + (C - 1) * K + d);
            for (int i = C - 1; i >= 0; i--) {
                const int query = i * K + d, key = (C + i) * K + d;
                const Vector<T> factor = at(from_start + query);
                later += (at(rows_up + query) * at(qk + query) + at(rows_up + key) * at(qk + key)) * factor;
                at(decay_up + query) = later;
                at(qk_up + query) = at(rows_up + query) * factor;
                at(qk_up + key) = at(rows_up + key) * factor + at(late_up + query) * at(to_end + query);
            }
            for (int j = 0; j < C; j++) {
                at(decay_up + j * K + d) += earlier;
                earlier += at(late_up + j * K + d) * at(late_keys + j * K + d);
            }
        }
    }

    // Through Q K^T . D and K K^T . D: log a_t stands in D_ij for j < t <= i. Leaves one number a token in decay_up.
    void through_head_pairs() {
        T columns[C] = {};
        for (int i = C - 1; i >= 0; i--) {
            Vector<T> sums = {};
            for (int d = 0; d < K; d += L) sums += at(decay_up + i * K + d);
            T total = sum_lanes<T>(sums);
            for (int j = 0; j < C; j++) {
                const int query = i * C + j, key = (C + i) * C + j;
                columns[j] += pairs_up[query] * pairs[query] + pairs_up[key] * pairs[key];
                pairs_up[query] *= pair_decay[query];
                pairs_up[key] *= j == i ? T(0) : pair_decay[query];
            }
            for (int j = 0; j < i; j++) total += columns[j];
            decay_up[i * K] = total;
        }
        product<T>(half, K, C, {pairs_up, C}, qk + C * K, K, qk_up, K, true);
        product<T>(C, K, half, {pairs_up, 1, C}, qk, K, qk_up + C * K, K, true);
    }

    // The same for a decay of each channel: keys decay from token to token, and their gradients on the way back.
    void through_channel_pairs() {
        T *keys = turned, *back = turned + C * K;
        std::memcpy(keys, qk + C * K, sizeof(T) * C * K);
        std::memset(back, 0, sizeof(T) * C * K);
        for (int i = 0; i < C; i++)
            for (int d = 0; d < K; d += L) {
                const Vector<T> factor = at(decay + i * K + d), q = at(qk + i * K + d), k = at(qk + (C + i) * K + d);
                Vector<T> q_up = at(keys + i * K + d) * pairs_up[i * C + i], k_up = {}, earlier = {};
                for (int j = 0; j < i; j++) {
                    const T query = pairs_up[i * C + j], key = pairs_up[(C + i) * C + j];
                    const Vector<T> row = at(keys + j * K + d) *= factor;
                    q_up += row * query;
                    k_up += row * key;
                    earlier += (q * query + k * key) * row;
                    at(decay_up + (j + 1) * K + d) += earlier;
                }
                at(qk_up + i * K + d) += q_up;
                at(qk_up + (C + i) * K + d) += k_up;
            }
        for (int i = C - 1; i >= 0; i--)
            for (int d = 0; d < K; d += L) {
                const Vector<T> factor = at(decay + i * K + d), q = at(qk + i * K + d), k = at(qk + (C + i) * K + d);
                for (int j = 0; j < i; j++) {
                    Vector<T>& sum = at(back + j * K + d);
                    sum = (sum + q * pairs_up[i * C + j] + k * pairs_up[(C + i) * C + j]) * factor;
                }
                at(qk_up + (C + i) * K + d) += at(back + i * K + d) + q * pairs_up[i * C + i];
            }
    }
};

template <typename F> void for_heads(const Tensor& v, const F& f) {
    at::parallel_for(0, v.size(0) * v.size(1), 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++)
            if (v.scalar_type() == at::kDouble) f(double(), row / v.size(1), row % v.size(1));
            else f(float(), row / v.size(1), row % v.size(1));
    });
}

Tensor with_rows(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

struct Recurrence : torch::autograd::Function<Recurrence> {
    static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& log_decay, const optional<Tensor>& beta, const optional<Tensor>& starts,
                                 const Tensor& state, bool gradients) {
        const int64_t batch = v.size(0), heads = v.size(1), length = v.size(2);
        Tensor decay = log_decay.exp();
        if (starts) decay = decay.masked_fill(*starts, 0.0);
        Call call{with_rows(q), with_rows(k), with_rows(v), with_rows(decay.expand({batch, heads, length, -1}))};
        if (beta) call.beta = beta->unsqueeze(3);
        Tensor out = at::empty({batch, length, heads, v.size(3)}, v.options()).transpose(1, 2);
        Tensor after = state.clone(at::MemoryFormat::Contiguous);
        if (gradients) {
            const int64_t size = padded(k.size(3)) * padded(v.size(3));
            call.kept = at::empty({batch, heads, (length + C * KEPT - 1) / (C * KEPT), size}, v.options());
            call.values = beta ? at::empty({batch, heads, length, v.size(3)}, v.options()) : call.v;
        }
        for_heads(v, [&](auto zero, int64_t b, int64_t h) { forward_head<decltype(zero)>(call, out, after, b, h); });
        ctx->save_for_backward({call.q, call.k, call.decay, call.beta, call.kept, call.values});
        ctx->saved_data["decay"] = log_decay.sizes();
        return {out, after};
    }

    static variable_list backward(AutogradContext* ctx, variable_list up) {
        refuse_second_derivatives("recurrence");
        const auto saved = ctx->get_saved_variables();
        const Tensor& v = saved[5];
        const Call call{saved[0], saved[1], v, saved[2], saved[3], saved[4], v};
        const int64_t batch = v.size(0), length = v.size(2), heads = v.size(1), groups = call.k.size(1);
        const auto rows = [&](int64_t width) { return at::empty({batch, length, heads, width}, v.options()).transpose(1, 2); };
        const int64_t d_k = call.k.size(3), d_v = v.size(3);
        Gradients to{rows(d_k), rows(d_k), rows(d_v), rows(call.decay.size(3)), call.beta.defined() ? rows(1) : Tensor()};
        to.state = up[1].defined() ? up[1].clone(at::MemoryFormat::Contiguous) : at::zeros({batch, heads, d_k, d_v}, v.options());
        const Tensor out_up = up[0].defined() ? with_rows(up[0]) : at::zeros(v.sizes(), v.options());
        const auto run = [&](auto zero, int64_t b, int64_t h) { BackwardHead<decltype(zero)>(call, b, h).run(call, out_up, to, b, h); };
        for_heads(v, run);
        for (Tensor* x : {&to.q, &to.k})
            if (groups != heads) *x = x->unflatten(1, {groups, heads / groups}).sum(2);
        to.decay = to.decay.sum_to_size(ctx->saved_data["decay"].toIntVector());
        return {to.q, to.k, to.v, to.decay, to.beta.defined() ? to.beta.squeeze(3) : Tensor(), Tensor(), to.state, Tensor()};
    }
};

// starts: bool [B, 1, T, 1], the tokens before which the state is forgotten. See `heddle.numerics.recurrent.recurrence`.
std::tuple<Tensor, Tensor> recurrence(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay,
                                      const optional<Tensor>& beta, const optional<Tensor>& starts, const Tensor& state) {
    bool gradients = false;
    for (const Tensor& x : {q, k, v, log_decay, state, beta.value_or(v)}) gradients |= x.requires_grad();
    auto results = Recurrence::apply(q, k, v, log_decay, beta, starts, state, gradients && at::GradMode::is_enabled());
    return {results[0], results[1]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(heddle, m) {
    const char* inputs = "(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor? beta, Tensor? starts, Tensor state)";
    for (const char* name : {"delta", "ssd"}) m.def((std::string(name) + inputs + " -> (Tensor, Tensor)").c_str(), &recurrence);
}

}  // namespace heddle
