// Products of small matrices, and causal attention of short rows by such products.
//
// C [M, N] = A [M, K] B [K, N]: B is packed into panels of `PANEL` columns, which lie in cache while tiles of six rows
// of A pass over them. A tile of C stays in registers (Goto & van de Geijn 2008).
#include "common.h"

namespace heddle {

#ifdef __AVX512F__
constexpr int BYTES = 64, VECTORS = 4;
#else
constexpr int BYTES = 32, VECTORS = 2;
#endif
constexpr int ROWS = 6, DEPTH = 256;  // of a tile, and of the part of K that is added at a time

template <typename W>
constexpr int LANES = BYTES / int(sizeof(W));
template <typename W>
constexpr int PANEL = VECTORS * LANES<W>;
template <typename W>
int64_t panels(int64_t columns) {
    return (columns + PANEL<W> - 1) / PANEL<W>;
}

// A matrix in memory: element (i, j) is at[i * row + j * column].
template <typename W>
struct Matrix {
    W* at;
    int64_t row, column;
};

// R rows of V vectors: c (+)= a b, b [depth, PANEL]. The last vectors may hold fewer than `columns` elements.
template <typename W, int R, int V>
void tile(int64_t depth, const W* a, int64_t row, int64_t column, const W* b, W* c, int64_t ldc, int64_t columns,
          bool add) {
    typedef W Vector __attribute__((vector_size(BYTES)));
    typedef W Unaligned __attribute__((vector_size(BYTES), aligned(sizeof(W))));
    Vector sum[R][V] = {};
    for (int64_t k = 0; k < depth; k++) {
        Vector part[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) part[v] = *reinterpret_cast<const Unaligned*>(b + k * PANEL<W> + v * LANES<W>);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const W factor = a[r * row + k * column];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sum[r][v] += factor * part[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        W* out = c + r * ldc;
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            if (columns >= (v + 1) * LANES<W>) {
                Unaligned* to = reinterpret_cast<Unaligned*>(out + v * LANES<W>);
                *to = add ? *to + sum[r][v] : sum[r][v];
            } else {
                for (int i = 0; v * LANES<W> + i < columns; i++)
                    out[v * LANES<W> + i] = (add ? out[v * LANES<W> + i] : W(0)) + sum[r][v][i];
            }
        }
    }
}

template <typename W, int R>
void tile_of(int64_t depth, const W* a, int64_t row, int64_t column, const W* b, W* c, int64_t ldc, int64_t columns,
             bool add) {
    const int64_t vectors = (columns + LANES<W> - 1) / LANES<W>;
    if (vectors >= VECTORS)
        tile<W, R, VECTORS>(depth, a, row, column, b, c, ldc, columns, add);
    else if (vectors == 3)
        tile<W, R, 3>(depth, a, row, column, b, c, ldc, columns, add);
    else if (vectors == 2)
        tile<W, R, 2>(depth, a, row, column, b, c, ldc, columns, add);
    else
        tile<W, R, 1>(depth, a, row, column, b, c, ldc, columns, add);
}

// Pack panels first … last of B [depth, columns] into [panels, depth, PANEL], with zeros after the last column.
template <typename W>
void pack(Matrix<const W> b, int64_t depth, int64_t columns, W* packed, int64_t first, int64_t last) {
    constexpr int64_t P = PANEL<W>;
    for (int64_t panel = first; panel < last; panel++) {
        const W* from = b.at + panel * P * b.column;
        W* to = packed + panel * depth * P;
        const int64_t n = std::min(P, columns - panel * P);
        if (b.column == 1) {
            for (int64_t k = 0; k < depth; k++) {
                for (int64_t j = 0; j < n; j++) to[k * P + j] = from[k * b.row + j];
                for (int64_t j = n; j < P; j++) to[k * P + j] = 0;
            }
        } else {
            for (int64_t start = 0; start < depth; start += 16) {
                const int64_t stop = std::min(depth, start + 16);
                for (int64_t j = 0; j < n; j++)
                    for (int64_t k = start; k < stop; k++) to[k * P + j] = from[k * b.row + j * b.column];
                for (int64_t k = start; k < stop; k++)
                    for (int64_t j = n; j < P; j++) to[k * P + j] = 0;
            }
        }
    }
}

// Rows first … last of C (+)= A B, with B packed.
template <typename W>
void multiply_rows(int64_t first, int64_t last, int64_t columns, int64_t depth, Matrix<const W> a, const W* packed,
                   W* c, int64_t ldc, bool add) {
    constexpr int64_t P = PANEL<W>;
    for (int64_t k = 0; k < depth; k += DEPTH) {
        const int64_t count = std::min<int64_t>(DEPTH, depth - k);
        for (int64_t panel = 0; panel < panels<W>(columns); panel++) {
            const W* b = packed + (panel * depth + k) * P;
            const int64_t n = std::min(P, columns - panel * P);
            for (int64_t i = first; i < last; i += ROWS) {
                const W* from = a.at + i * a.row + k * a.column;
                W* to = c + i * ldc + panel * P;
                switch (std::min<int64_t>(ROWS, last - i)) {
                    case 6:
                        tile_of<W, 6>(count, from, a.row, a.column, b, to, ldc, n, add || k);
                        break;
                    case 5:
                        tile_of<W, 5>(count, from, a.row, a.column, b, to, ldc, n, add || k);
                        break;
                    case 4:
                        tile_of<W, 4>(count, from, a.row, a.column, b, to, ldc, n, add || k);
                        break;
                    case 3:
                        tile_of<W, 3>(count, from, a.row, a.column, b, to, ldc, n, add || k);
                        break;
                    case 2:
                        tile_of<W, 2>(count, from, a.row, a.column, b, to, ldc, n, add || k);
                        break;
                    default:
                        tile_of<W, 1>(count, from, a.row, a.column, b, to, ldc, n, add || k);
                }
            }
        }
    }
}

template <typename W>
void multiply(int64_t rows, int64_t columns, int64_t depth, Matrix<const W> a, Matrix<const W> b, W* c) {
    const int64_t count = panels<W>(columns), blocks = (rows + ROWS - 1) / ROWS;
    std::unique_ptr<W[]> packed(new W[count * depth * PANEL<W>]);
    W* p = packed.get();
    const bool is_small = rows * columns * depth < (1 << 18);
    at::parallel_for(0, count, is_small ? count : 1,
                     [=](int64_t first, int64_t last) { pack<W>(b, depth, columns, p, first, last); });
    at::parallel_for(0, blocks, is_small ? blocks : 4, [=](int64_t first, int64_t last) {
        multiply_rows<W>(first * ROWS, std::min(rows, last * ROWS), columns, depth, a, p, c, columns, false);
    });
}

#define HEDDLE_WIDE(tensor, W, ...)                                              \
    if ((tensor).scalar_type() == at::kDouble) {                                 \
        using W = double;                                                        \
        __VA_ARGS__;                                                             \
    } else {                                                                     \
        TORCH_CHECK((tensor).scalar_type() == at::kFloat, "float32 or float64"); \
        using W = float;                                                         \
        __VA_ARGS__;                                                             \
    }

// y = x W^T of x [..., in] and W [out, in], and its gradients dx = dy W, dW = dy^T x.
struct Linear : torch::autograd::Function<Linear> {
    static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight) {
        const Tensor x = input.contiguous(), w = weight.contiguous();
        const int64_t in = w.size(1), out = w.size(0), rows = in ? x.numel() / in : 0;
        auto sizes = x.sizes().vec();
        sizes.back() = out;
        Tensor y = at::empty(sizes, x.options());
        HEDDLE_WIDE(
            x, W,
            multiply<W>(rows, out, in, {x.const_data_ptr<W>(), in, 1}, {w.const_data_ptr<W>(), 1, in}, y.data_ptr<W>()))
        ctx->save_for_backward({x, w});
        ctx->saved_data["needs"] = int64_t(input.requires_grad()) + 2 * int64_t(weight.requires_grad());
        return y;
    }

    static variable_list backward(AutogradContext* ctx, variable_list gradients) {
        refuse_second_derivatives("linear");
        const auto saved = ctx->get_saved_variables();
        const Tensor &x = saved[0], &w = saved[1], dy = gradients[0].contiguous();
        const int64_t in = w.size(1), out = w.size(0), rows = in ? x.numel() / in : 0,
                      needs = ctx->saved_data["needs"].toInt();
        Tensor dx, dw;
        if (needs & 1) {
            dx = at::empty_like(x);
            HEDDLE_WIDE(x, W,
                        multiply<W>(rows, in, out, {dy.const_data_ptr<W>(), out, 1}, {w.const_data_ptr<W>(), in, 1},
                                    dx.data_ptr<W>()))
        }
        if (needs & 2) {
            dw = at::empty_like(w);
            HEDDLE_WIDE(x, W,
                        multiply<W>(out, in, rows, {dy.const_data_ptr<W>(), 1, out}, {x.const_data_ptr<W>(), in, 1},
                                    dw.data_ptr<W>()))
        }
        return {dx, dw};
    }
};

Tensor linear(const Tensor& x, const Tensor& weight) { return Linear::apply(x, weight); }

// Causal attention: q [B, H, T, d], k [B, G, S, d], v [B, G, S, e] -> [B, H, T, e]; the queries are the last T
// positions. A thread takes one row and one group of heads. Only the logarithms of the sums of exponentials are kept.
// starts int64 [B, T], with T = S: the first key that each query sees, for rows of several documents or a window.

constexpr int64_t QUERIES = 48;  // of a tile, a multiple of ROWS

template <typename W>
struct Heads {
    W* at;
    int64_t batch, head, token;  // strides; the last one is 1

    explicit Heads(const Tensor& x) : at(x.data_ptr<W>()), batch(x.stride(0)), head(x.stride(1)), token(x.stride(2)) {}
    W* of(int64_t b, int64_t h, int64_t t = 0) const { return at + b * batch + h * head + t * token; }
};

struct Sizes {
    int64_t batch, heads, groups, queries, keys, dim, values;

    Sizes(const Tensor& q, const Tensor& k, const Tensor& v)
        : batch(q.size(0)),
          heads(q.size(1)),
          groups(k.size(1)),
          queries(q.size(2)),
          keys(k.size(2)),
          dim(q.size(3)),
          values(v.size(3)) {}
};

// The first key of a tile of queries, at the beginning of a panel, and the first key of one query.
template <typename W>
int64_t first_key(const int64_t* starts, int64_t count) {
    return starts ? *std::min_element(starts, starts + count) / PANEL<W> * PANEL<W> : 0;
}
inline const int64_t* starts_of(const int64_t* starts, const Sizes& z, int64_t b, int64_t query) {
    return starts ? starts + b * z.queries + query : nullptr;
}

template <typename W>
using Buffer = std::unique_ptr<W[]>;
template <typename W>
Buffer<W> packed_buffer(int64_t depth, int64_t columns) {
    return Buffer<W>(new W[panels<W>(columns) * depth * PANEL<W>]);
}

template <typename W>
Buffer<W> pack_all(Matrix<const W> b, int64_t depth, int64_t columns) {
    Buffer<W> packed = packed_buffer<W>(depth, columns);
    pack<W>(b, depth, columns, packed.get(), 0, panels<W>(columns));
    return packed;
}

template <typename W>
void attention_forward(const Sizes z, const Tensor& q_, const Tensor& k_, const Tensor& v_, const int64_t* starts,
                       Tensor& y_, Tensor& sums_, W scale) {
    const Heads<W> q(q_), k(k_), v(v_), y(y_);
    W* sums = sums_.data_ptr<W>();
    const int64_t per_group = z.heads / z.groups;
    at::parallel_for(0, z.batch * z.groups, 1, [=](int64_t begin, int64_t end) {
        const int64_t width = panels<W>(z.keys) * PANEL<W>;
        Buffer<W> scores(new W[QUERIES * width]);
        for (int64_t task = begin; task < end; task++) {
            const int64_t b = task / z.groups, g = task % z.groups;
            const Buffer<W> keys = pack_all<W>({k.of(b, g), 1, k.token}, z.dim, z.keys);
            const Buffer<W> values = pack_all<W>({v.of(b, g), v.token, 1}, z.keys, z.values);
            for (int64_t h = g * per_group; h < (g + 1) * per_group; h++)
                for (int64_t start = 0; start < z.queries; start += QUERIES) {
                    const int64_t count = std::min(QUERIES, z.queries - start),
                                  visible = z.keys - z.queries + start + count;
                    const int64_t *from = starts_of(starts, z, b, start), first = first_key<W>(from, count);
                    multiply_rows<W>(0, count, visible - first, z.dim, {q.of(b, h, start), q.token, 1},
                                     keys.get() + first * z.dim, scores.get() + first, width, false);
                    for (int64_t i = 0; i < count; i++) {
                        W* row = scores.get() + i * width;
                        const int64_t n = visible - count + i + 1, s = from ? from[i] : 0;
                        W largest = -INFINITY, total = 0;
#pragma omp simd reduction(max : largest)
                        for (int64_t j = s; j < n; j++) largest = row[j] * scale > largest ? row[j] * scale : largest;
#pragma omp simd reduction(+ : total)
                        for (int64_t j = s; j < n; j++) {
                            row[j] = fast_exp(row[j] * scale - largest);
                            total += row[j];
                        }
#pragma omp simd
                        for (int64_t j = s; j < n; j++) row[j] /= total;
                        std::fill(row + first, row + s, W(0));
                        std::fill(row + n, row + visible, W(0));
                        sums[(b * z.heads + h) * z.queries + start + i] = std::log(total) + largest;
                    }
                    // the values are packed for all keys, so later keys are left out by depth, panel by panel
                    for (int64_t panel = 0; panel < panels<W>(z.values); panel++)
                        multiply_rows<W>(0, count, std::min<int64_t>(PANEL<W>, z.values - panel * PANEL<W>),
                                         visible - first, {scores.get() + first, width, 1},
                                         values.get() + (panel * z.keys + first) * PANEL<W>,
                                         y.of(b, h, start) + panel * PANEL<W>, y.token, false);
                }
        }
    });
}

template <typename W>
void attention_backward(const Sizes z, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& y_,
                        const Tensor& sums_, const Tensor& dy_, const int64_t* starts, Tensor& dq_, Tensor& dk_,
                        Tensor& dv_, W scale) {
    const Heads<W> q(q_), k(k_), v(v_), y(y_), dy(dy_), dq(dq_), dk(dk_), dv(dv_);
    const W* sums = sums_.data_ptr<W>();
    const int64_t per_group = z.heads / z.groups;
    at::parallel_for(0, z.batch * z.groups, 1, [=](int64_t begin, int64_t end) {
        const int64_t width = panels<W>(z.keys) * PANEL<W>;
        Buffer<W> weights(new W[QUERIES * width]), slopes(new W[QUERIES * width]);
        Buffer<W> tile_q = packed_buffer<W>(QUERIES, z.dim), tile_dy = packed_buffer<W>(QUERIES, z.values);
        for (int64_t task = begin; task < end; task++) {
            const int64_t b = task / z.groups, g = task % z.groups;
            const Buffer<W> keys = pack_all<W>({k.of(b, g), 1, k.token}, z.dim, z.keys);
            const Buffer<W> rows = pack_all<W>({k.of(b, g), k.token, 1}, z.keys, z.dim);
            const Buffer<W> values = pack_all<W>({v.of(b, g), 1, v.token}, z.values, z.keys);
            for (int64_t s = 0; s < z.keys; s++) {
                std::fill_n(dk.of(b, g, s), z.dim, W(0));
                std::fill_n(dv.of(b, g, s), z.values, W(0));
            }
            for (int64_t h = g * per_group; h < (g + 1) * per_group; h++)
                for (int64_t start = 0; start < z.queries; start += QUERIES) {
                    const int64_t count = std::min(QUERIES, z.queries - start),
                                  visible = z.keys - z.queries + start + count;
                    const int64_t *from = starts_of(starts, z, b, start), first = first_key<W>(from, count);
                    multiply_rows<W>(0, count, visible - first, z.dim, {q.of(b, h, start), q.token, 1},
                                     keys.get() + first * z.dim, weights.get() + first, width, false);
                    multiply_rows<W>(0, count, visible - first, z.values, {dy.of(b, h, start), dy.token, 1},
                                     values.get() + first * z.values, slopes.get() + first, width, false);
                    for (int64_t i = 0; i < count; i++) {
                        W *p = weights.get() + i * width, *ds = slopes.get() + i * width;
                        const W *out = y.of(b, h, start + i), *up = dy.of(b, h, start + i);
                        const W sum = sums[(b * z.heads + h) * z.queries + start + i];
                        const int64_t n = visible - count + i + 1, s = from ? from[i] : 0;
                        W dot = 0;
#pragma omp simd reduction(+ : dot)
                        for (int64_t j = 0; j < z.values; j++) dot += out[j] * up[j];
#pragma omp simd
                        for (int64_t j = s; j < n; j++) {
                            p[j] = fast_exp(p[j] * scale - sum);
                            ds[j] = p[j] * (ds[j] - dot) * scale;
                        }
                        for (int64_t j = first; j < s; j++) p[j] = ds[j] = 0;
                        for (int64_t j = n; j < visible; j++) p[j] = ds[j] = 0;
                    }
                    for (int64_t panel = 0; panel < panels<W>(z.dim); panel++)
                        multiply_rows<W>(0, count, std::min<int64_t>(PANEL<W>, z.dim - panel * PANEL<W>),
                                         visible - first, {slopes.get() + first, width, 1},
                                         rows.get() + (panel * z.keys + first) * PANEL<W>,
                                         dq.of(b, h, start) + panel * PANEL<W>, dq.token, false);
                    pack<W>({q.of(b, h, start), q.token, 1}, count, z.dim, tile_q.get(), 0, panels<W>(z.dim));
                    pack<W>({dy.of(b, h, start), dy.token, 1}, count, z.values, tile_dy.get(), 0, panels<W>(z.values));
                    multiply_rows<W>(0, visible - first, z.dim, count, {slopes.get() + first, 1, width}, tile_q.get(),
                                     dk.of(b, g, first), dk.token, true);
                    multiply_rows<W>(0, visible - first, z.values, count, {weights.get() + first, 1, width},
                                     tile_dy.get(), dv.of(b, g, first), dv.token, true);
                }
        }
    });
}

// Heads [B, H, T, d] in the memory layout [B, T, H, d], in which projections write and read them.
Tensor empty_heads(const Tensor& like, int64_t dim) {
    return at::empty({like.size(0), like.size(2), like.size(1), dim}, like.options()).transpose(1, 2);
}

Tensor readable(const Tensor& x, at::ScalarType type) {
    const Tensor y = x.to(type);
    return y.stride(3) == 1 ? y : y.contiguous();
}

// The operators of a compiled graph, forward and backward, in the wide type. On the meta device they only allocate.
using Starts = optional<Tensor>;

std::tuple<Tensor, Tensor> attend(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Starts& starts_,
                                  double scale) {
    const auto type = q_.scalar_type();
    const Tensor q = readable(q_, type), k = readable(k_, type), v = readable(v_, type);
    const Sizes z(q, k, v);
    Tensor y = empty_heads(q, z.values), sums = at::empty({z.batch, z.heads, z.queries}, q.options());
    if (q.is_meta()) return {y, sums};
    const Tensor starts = starts_ ? starts_->contiguous() : Tensor();
    const int64_t* from = starts_ ? starts.const_data_ptr<int64_t>() : nullptr;
    HEDDLE_WIDE(q, W, attention_forward<W>(z, q, k, v, from, y, sums, W(scale)))
    return {y, sums};
}

std::tuple<Tensor, Tensor, Tensor> attend_backward(const Tensor& q_, const Tensor& k_, const Tensor& v_,
                                                   const Tensor& y_, const Tensor& sums, const Tensor& dy_,
                                                   const Starts& starts_, double scale) {
    const auto type = q_.scalar_type();
    const Tensor q = readable(q_, type), k = readable(k_, type), v = readable(v_, type), y = readable(y_, type),
                 dy = readable(dy_, type);
    Tensor dq = empty_heads(q, q.size(3)), dk = empty_heads(k, k.size(3)), dv = empty_heads(v, v.size(3));
    if (q.is_meta()) return {dq, dk, dv};
    const Tensor starts = starts_ ? starts_->contiguous() : Tensor();
    const int64_t* from = starts_ ? starts.const_data_ptr<int64_t>() : nullptr;
    const Sizes z(q, k, v);
    HEDDLE_WIDE(q, W, attention_backward<W>(z, q, k, v, y, sums.contiguous(), dy, from, dq, dk, dv, W(scale)))
    return {dq, dk, dv};
}

template <typename F, typename... Arguments>
auto call_operator(F*, const char* name, const Arguments&... arguments) {
    at::AutoDispatchBelowADInplaceOrView below;
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>().call(arguments...);
}

struct CausalAttention : torch::autograd::Function<CausalAttention> {
    static Tensor forward(AutogradContext* ctx, const Tensor& q_, const Tensor& k_, const Tensor& v_,
                          const Starts& starts, double scale) {
        const auto type = q_.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
        const Tensor q = q_.to(type), k = k_.to(type), v = v_.to(type);
        const auto [y, sums] = call_operator((decltype(attend)*)nullptr, "heddle::attend", q, k, v, starts, scale);
        ctx->save_for_backward({q, k, v, y, sums, starts ? *starts : Tensor()});
        ctx->saved_data["scale"] = scale;
        ctx->saved_data["dtype"] = int64_t(q_.scalar_type());
        return y.to(q_.scalar_type());
    }

    static variable_list backward(AutogradContext* ctx, variable_list gradients) {
        refuse_second_derivatives("causal_attention");
        const auto saved = ctx->get_saved_variables();
        const Tensor dy = gradients[0].to(saved[0].scalar_type());
        const auto [dq, dk, dv] = call_operator(
            (decltype(attend_backward)*)nullptr, "heddle::attend_backward", saved[0], saved[1], saved[2], saved[3],
            saved[4], dy, saved[5].defined() ? Starts(saved[5]) : Starts(), ctx->saved_data["scale"].toDouble());
        const auto type = at::ScalarType(ctx->saved_data["dtype"].toInt());
        return {dq.to(type), dk.to(type), dv.to(type), Tensor(), Tensor()};
    }
};

Tensor causal_attention(const Tensor& q, const Tensor& k, const Tensor& v, double scale, const Starts& starts) {
    return CausalAttention::apply(q, k, v, starts, scale);
}

TORCH_LIBRARY_FRAGMENT(heddle, m) {
    m.def("linear(Tensor x, Tensor weight) -> Tensor", &linear);
    m.def("causal_attention(Tensor q, Tensor k, Tensor v, float scale, Tensor? starts) -> Tensor", &causal_attention);
    m.def("attend(Tensor q, Tensor k, Tensor v, Tensor? starts, float scale) -> (Tensor, Tensor)");
    m.def(
        "attend_backward(Tensor q, Tensor k, Tensor v, Tensor y, Tensor sums, Tensor dy, Tensor? starts, float scale) "
        "-> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(heddle, CPU, m) {
    m.impl("attend", &attend);
    m.impl("attend_backward", &attend_backward);
}
TORCH_LIBRARY_IMPL(heddle, Meta, m) {
    m.impl("attend", &attend);
    m.impl("attend_backward", &attend_backward);
}

}  // namespace heddle
