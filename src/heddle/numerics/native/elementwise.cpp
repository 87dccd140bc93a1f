// Passes over rows that read and write each element once.
#include "common.h"

namespace heddle {

// RMSNorm: y = g x / sqrt(mean(x^2) + eps), g [width] or none, in the wide type; see `heddle.numerics.norms.reference`.
// rounds: y is rounded to the storage type before it is multiplied by g.

template <typename T>
void rms_norm_rows(const T* x, const Wide<T>* g, T* y, Wide<T>* scales, int64_t rows, int64_t width, double eps,
                   bool rounds) {
    using W = Wide<T>;
    for_rows(rows, width, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const T* in = x + row * width;
            T* out = y + row * width;
            W total = 0;
#pragma omp simd reduction(+ : total)
            for (int64_t i = 0; i < width; i++) total += wide(in[i]) * wide(in[i]);
            const W scale = 1 / std::sqrt(total / W(width) + W(eps));
            scales[row] = scale;
            if (!g) {
#pragma omp simd
                for (int64_t i = 0; i < width; i++) out[i] = narrow<T>(wide(in[i]) * scale);
            } else if (rounds) {
#pragma omp simd
                for (int64_t i = 0; i < width; i++) out[i] = narrow<T>(g[i] * wide(narrow<T>(wide(in[i]) * scale)));
            } else {
#pragma omp simd
                for (int64_t i = 0; i < width; i++) out[i] = narrow<T>(g[i] * (wide(in[i]) * scale));
            }
        }
    });
}

// dx = s (g dy - x s^2 mean(g dy x)), dg = sum over rows of dy x s, summed per thread and then over threads.
template <typename T>
void rms_norm_backward_rows(const T* x, const Wide<T>* g, const Wide<T>* scales, const T* dy, T* dx, Wide<T>* dg,
                            int64_t rows, int64_t width) {
    using W = Wide<T>;
    const int64_t parts = std::min<int64_t>(at::get_num_threads(), std::max<int64_t>(1, rows * width / GRAIN));
    std::vector<W> sums(dg ? parts * width : 0, W(0));
    W* all = sums.data();
    at::parallel_for(0, parts, 1, [=](int64_t first, int64_t last) {
        for (int64_t part = first; part < last; part++) {
            W* sum = dg ? all + part * width : nullptr;
            for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++) {
                const T *in = x + row * width, *up = dy + row * width;
                T* out = dx + row * width;
                const W scale = scales[row];
                W dot = 0;
                if (g) {
#pragma omp simd reduction(+ : dot)
                    for (int64_t i = 0; i < width; i++) dot += g[i] * wide(up[i]) * wide(in[i]);
                } else {
#pragma omp simd reduction(+ : dot)
                    for (int64_t i = 0; i < width; i++) dot += wide(up[i]) * wide(in[i]);
                }
                const W c = dot * scale * scale / W(width);
                if (g) {
#pragma omp simd
                    for (int64_t i = 0; i < width; i++)
                        out[i] = narrow<T>(scale * (g[i] * wide(up[i]) - c * wide(in[i])));
                } else {
#pragma omp simd
                    for (int64_t i = 0; i < width; i++) out[i] = narrow<T>(scale * (wide(up[i]) - c * wide(in[i])));
                }
                if (sum) {
#pragma omp simd
                    for (int64_t i = 0; i < width; i++) sum[i] += wide(up[i]) * wide(in[i]) * scale;
                }
            }
        }
    });
    for (int64_t part = 0; dg && part < parts; part++)
        for (int64_t i = 0; i < width; i++) dg[i] += all[part * width + i];
}

inline at::ScalarType wide_type(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

struct RMSNorm : torch::autograd::Function<RMSNorm> {
    static Tensor forward(AutogradContext* ctx, const Tensor& input, const optional<Tensor>& weight, double eps,
                          double offset, bool before) {
        const Tensor x = input.contiguous();
        const int64_t width = x.size(-1), rows = width ? x.numel() / width : 0;
        Tensor g, y = at::empty_like(x), scales = at::empty({rows}, x.options().dtype(wide_type(x)));
        if (weight) {
            g = *weight;
            if (before)
                g = (offset ? at::add(g, offset) : g).to(x.scalar_type()).to(scales.scalar_type());
            else
                g = offset ? at::add(g.to(scales.scalar_type()), offset) : g.to(scales.scalar_type());
            g = g.contiguous();
        }
        HEDDLE_DISPATCH(x, T,
                        rms_norm_rows<T>(x.const_data_ptr<T>(), g.defined() ? g.const_data_ptr<Wide<T>>() : nullptr,
                                         y.data_ptr<T>(), scales.data_ptr<Wide<T>>(), rows, width, eps, before))
        ctx->save_for_backward({x, g, scales});
        ctx->saved_data["weight"] = weight ? int64_t(weight->scalar_type()) : int64_t(-1);
        ctx->saved_data["trains"] = weight && weight->requires_grad();
        return y;
    }

    static variable_list backward(AutogradContext* ctx, variable_list gradients) {
        refuse_second_derivatives("rms_norm");
        const auto saved = ctx->get_saved_variables();
        const Tensor &x = saved[0], &g = saved[1], &scales = saved[2], dy = gradients[0].contiguous();
        Tensor dx = at::empty_like(x), dg;
        if (ctx->saved_data["trains"].toBool()) dg = at::zeros({x.size(-1)}, scales.options());
        HEDDLE_DISPATCH(
            x, T,
            rms_norm_backward_rows<T>(x.const_data_ptr<T>(), g.defined() ? g.const_data_ptr<Wide<T>>() : nullptr,
                                      scales.const_data_ptr<Wide<T>>(), dy.const_data_ptr<T>(), dx.data_ptr<T>(),
                                      dg.defined() ? dg.data_ptr<Wide<T>>() : nullptr, scales.numel(), x.size(-1)))
        if (dg.defined()) dg = dg.to(at::ScalarType(ctx->saved_data["weight"].toInt()));
        return {dx, dg, Tensor(), Tensor(), Tensor()};
    }
};

Tensor rms_norm(const Tensor& x, const optional<Tensor>& weight, double eps, double offset, bool before) {
    return RMSNorm::apply(x, weight, eps, offset, before);
}

// SwiGLU: y = g sigmoid(g) u, and its gradients.

// A function of its own: where GCC 12 inlined this loop into its caller, it did not become vector instructions.
template <typename T>
[[gnu::noinline]] void swiglu_part(const T* gate, const T* up, T* y, int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        const Wide<T> g = wide(gate[i]);
        y[i] = narrow<T>(g / (1 + fast_exp(-g)) * wide(up[i]));
    }
}

template <typename T>
void swiglu_forward(const T* gate, const T* up, T* y, int64_t n) {
    at::parallel_for(0, n, GRAIN, [=](int64_t begin, int64_t end) { swiglu_part(gate, up, y, begin, end); });
}

template <typename T>
void swiglu_backward(const T* gate, const T* up, const T* dy, T* dgate, T* dup, int64_t n) {
    at::parallel_for(0, n, GRAIN, [=](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; i++) {
            const Wide<T> g = wide(gate[i]), d = wide(dy[i]), s = 1 / (1 + fast_exp(-g));
            dgate[i] = narrow<T>(d * wide(up[i]) * s * (1 + g * (1 - s)));
            dup[i] = narrow<T>(d * g * s);
        }
    });
}

struct Swiglu : torch::autograd::Function<Swiglu> {
    static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up) {
        const Tensor g = gate.contiguous(), u = up.contiguous();
        Tensor y = at::empty_like(g);
        HEDDLE_DISPATCH(g, T,
                        swiglu_forward<T>(g.const_data_ptr<T>(), u.const_data_ptr<T>(), y.data_ptr<T>(), g.numel()))
        ctx->save_for_backward({g, u});
        return y;
    }

    static variable_list backward(AutogradContext* ctx, variable_list gradients) {
        refuse_second_derivatives("swiglu");
        const auto saved = ctx->get_saved_variables();
        const Tensor &g = saved[0], &u = saved[1], dy = gradients[0].contiguous();
        Tensor dg = at::empty_like(g), du = at::empty_like(u);
        HEDDLE_DISPATCH(g, T,
                        swiglu_backward<T>(g.const_data_ptr<T>(), u.const_data_ptr<T>(), dy.const_data_ptr<T>(),
                                           dg.data_ptr<T>(), du.data_ptr<T>(), g.numel()))
        return {dg, du};
    }
};

Tensor swiglu(const Tensor& gate, const Tensor& up) { return Swiglu::apply(gate, up); }

// The backward pass of SwiGLU for rows of experts: row r of h = g sigmoid(g) u is multiplied by w[r] before the product
// that dh [rows, width] comes from. Returns w h, the gradients of g and u, and dh h summed over each row.

template <typename T>
[[gnu::noinline]] Wide<T> weighted_swiglu_row(const T* gate, const T* up, const T* dh, Wide<T> w, T* h, T* dgate,
                                              T* dup, int64_t width) {
    Wide<T> total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < width; i++) {
        const Wide<T> g = wide(gate[i]), u = wide(up[i]), d = wide(dh[i]), s = 1 / (1 + fast_exp(-g));
        total += d * g * s * u;
        h[i] = narrow<T>(w * g * s * u);
        dgate[i] = narrow<T>(w * d * u * s * (1 + g * (1 - s)));
        dup[i] = narrow<T>(w * d * g * s);
    }
    return total;
}

template <typename T>
void weighted_swiglu_rows(const T* gate, const T* up, const T* dh, const T* w, T* h, T* dgate, T* dup, T* dw,
                          int64_t rows, int64_t width) {
    for_rows(rows, width, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin, i = begin * width; row < end; row++, i += width)
            dw[row] = narrow<T>(
                weighted_swiglu_row(gate + i, up + i, dh + i, wide(w[row]), h + i, dgate + i, dup + i, width));
    });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> weighted_swiglu_backward(const Tensor& gate, const Tensor& up,
                                                                    const Tensor& dh, const Tensor& w) {
    Tensor h = at::empty_like(gate), dgate = at::empty_like(gate), dup = at::empty_like(gate), dw = at::empty_like(w);
    HEDDLE_DISPATCH(gate, T,
                    weighted_swiglu_rows<T>(gate.const_data_ptr<T>(), up.const_data_ptr<T>(), dh.const_data_ptr<T>(),
                                            w.const_data_ptr<T>(), h.data_ptr<T>(), dgate.data_ptr<T>(),
                                            dup.data_ptr<T>(), dw.data_ptr<T>(), gate.size(0), gate.size(1)))
    return {h, dgate, dup, dw};
}

// Rotation of pairs of heads x [B, H, T, d] by a table [1 or B, 1, T, pairs]; dims above 2 pairs are copied. turn: 1,
// or -1 for the inverse rotation, which is the gradient.

template <typename T>
void rotate_rows(const Tensor& x, const Tensor& cosines, const Tensor& sines, Tensor& y, bool half, Wide<T> turn) {
    const int64_t heads = x.size(1), length = x.size(2), dim = x.size(3), pairs = cosines.size(3);
    const int64_t per_row = cosines.size(0) > 1 ? length * pairs : 0;
    const T *in = x.const_data_ptr<T>(), *c = cosines.const_data_ptr<T>(), *s = sines.const_data_ptr<T>();
    T* out = y.data_ptr<T>();
    const int64_t xb = x.stride(0), xh = x.stride(1), xt = x.stride(2), yb = y.stride(0), yh = y.stride(1),
                  yt = y.stride(2);
    for_rows(x.size(0) * length, heads * dim, [=](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) {
            const int64_t b = token / length, t = token % length;
            const T *co = c + b * per_row + t * pairs, *si = s + b * per_row + t * pairs;
            for (int64_t h = 0; h < heads; h++) {
                const T* from = in + b * xb + h * xh + t * xt;
                T* to = out + b * yb + h * yh + t * yt;
                if (half) {
#pragma omp simd
                    for (int64_t i = 0; i < pairs; i++) {
                        const Wide<T> first = wide(from[i]), second = wide(from[i + pairs]);
                        const Wide<T> cosine = wide(co[i]), sine = turn * wide(si[i]);
                        to[i] = narrow<T>(first * cosine - second * sine);
                        to[i + pairs] = narrow<T>(second * cosine + first * sine);
                    }
                } else {
#pragma omp simd
                    for (int64_t i = 0; i < pairs; i++) {
                        const Wide<T> first = wide(from[2 * i]), second = wide(from[2 * i + 1]);
                        const Wide<T> cosine = wide(co[i]), sine = turn * wide(si[i]);
                        to[2 * i] = narrow<T>(first * cosine - second * sine);
                        to[2 * i + 1] = narrow<T>(second * cosine + first * sine);
                    }
                }
                for (int64_t i = 2 * pairs; i < dim; i++) to[i] = from[i];
            }
        }
    });
}

// The result has the memory layout [B, T, H, d], in which projections write heads and read them.
Tensor rotated(const Tensor& input, const Tensor& cosines, const Tensor& sines, bool half, double turn) {
    const Tensor x = input.stride(3) == 1 ? input : input.contiguous();
    Tensor y = at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
    HEDDLE_DISPATCH(x, T, rotate_rows<T>(x, cosines, sines, y, half, Wide<T>(turn)))
    return y;
}

struct Rotary : torch::autograd::Function<Rotary> {
    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cosines, const Tensor& sines,
                          bool half) {
        const Tensor c = cosines.contiguous(), s = sines.contiguous();
        ctx->save_for_backward({c, s});
        ctx->saved_data["half"] = half;
        return rotated(x, c, s, half, 1);
    }

    static variable_list backward(AutogradContext* ctx, variable_list gradients) {
        refuse_second_derivatives("rotary");
        const auto saved = ctx->get_saved_variables();
        return {rotated(gradients[0], saved[0], saved[1], ctx->saved_data["half"].toBool(), -1), Tensor(), Tensor(),
                Tensor()};
    }
};

Tensor rotary(const Tensor& x, const Tensor& cosines, const Tensor& sines, bool half) {
    return Rotary::apply(x, cosines, sines, half);
}

// Cross-entropy of scaled logits [n, vocab] with targets int64 [n]: returns the sum of the losses, in the wide type.
// With gradients, weight times the gradient of the sum overwrites the logits.

template <typename T>
void cross_entropy_rows(T* logits, const int64_t* targets, Wide<T>* losses, int64_t rows, int64_t vocab, Wide<T> scale,
                        Wide<T> weight, bool gradients) {
    using W = Wide<T>;
    for_rows(rows, vocab, [=](int64_t begin, int64_t end) {
        std::vector<W> buffer(vocab);
        W* e = buffer.data();
        for (int64_t row = begin; row < end; row++) {
            T* z = logits + row * vocab;
            W largest = -INFINITY;
#pragma omp simd reduction(max : largest)
            for (int64_t i = 0; i < vocab; i++) {
                e[i] = scale * wide(z[i]);
                largest = e[i] > largest ? e[i] : largest;  // std::max did not become vector instructions
            }
            const W target = e[targets[row]];
            double sum = 0;
            for (int64_t start = 0; start < vocab; start += 4096) {
                W part = 0;
                const int64_t stop = std::min(vocab, start + 4096);
#pragma omp simd reduction(+ : part)
                for (int64_t i = start; i < stop; i++) {
                    e[i] = fast_exp(e[i] - largest);
                    part += e[i];
                }
                sum += double(part);
            }
            const W total = W(sum);
            losses[row] = std::log(total) + largest - target;
            if (!gradients) continue;
            const W factor = scale * weight / total;
            const W at_target = e[targets[row]] * factor - scale * weight;
#pragma omp simd
            for (int64_t i = 0; i < vocab; i++) z[i] = narrow<T>(factor * e[i]);
            z[targets[row]] = narrow<T>(at_target);
        }
    });
}

Tensor cross_entropy_(Tensor logits, const Tensor& targets, double scale, double weight, bool gradients) {
    TORCH_CHECK(logits.is_contiguous() && targets.is_contiguous(), "cross_entropy_: logits must be contiguous");
    Tensor losses = at::empty({logits.size(0)}, logits.options().dtype(wide_type(logits)));
    HEDDLE_DISPATCH(
        logits, T,
        cross_entropy_rows<T>(logits.data_ptr<T>(), targets.const_data_ptr<int64_t>(), losses.data_ptr<Wide<T>>(),
                              logits.size(0), logits.size(1), Wide<T>(scale), Wide<T>(weight), gradients))
    return losses.sum();
}

// The Euclidean norm of each tensor, [n], in the wide type of the first one; double inside.

template <typename T>
double square_sum(const T* x, int64_t n) {
    double total = 0;
    for (int64_t start = 0; start < n; start += 4096) {
        Wide<T> part = 0;
        const int64_t stop = std::min(n, start + 4096);
#pragma omp simd reduction(+ : part)
        for (int64_t i = start; i < stop; i++) part += wide(x[i]) * wide(x[i]);
        total += double(part);
    }
    return total;
}

Tensor norms(at::TensorList tensors) {
    constexpr int64_t PART = 1 << 15;
    std::vector<std::pair<int64_t, int64_t>> parts;  // tensor, first element
    std::vector<Tensor> xs;
    for (const Tensor& x : tensors) {
        for (int64_t first = 0; first < x.numel(); first += PART) parts.emplace_back(int64_t(xs.size()), first);
        xs.push_back(x.contiguous());
    }
    std::vector<double> sums(parts.size()), totals(xs.size(), 0.0);
    at::parallel_for(0, int64_t(parts.size()), 2, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const Tensor& x = xs[parts[i].first];
            const int64_t first = parts[i].second, n = std::min(PART, x.numel() - first);
            HEDDLE_DISPATCH(x, T, sums[i] = square_sum<T>(x.const_data_ptr<T>() + first, n))
        }
    });
    for (size_t i = 0; i < parts.size(); i++) totals[parts[i].first] += sums[i];
    Tensor result = at::empty({int64_t(xs.size())}, xs[0].options().dtype(wide_type(xs[0])));
    for (size_t i = 0; i < xs.size(); i++)
        if (result.scalar_type() == at::kDouble)
            result.data_ptr<double>()[i] = std::sqrt(totals[i]);
        else
            result.data_ptr<float>()[i] = float(std::sqrt(totals[i]));
    return result;
}

// AdamW (Loshchilov & Hutter 2019) of contiguous tensors of one dtype, from gradients times `clip`: in one pass, which
// also adds the squares of the new weights and moments. Returns whether their sum is finite. Steps are float32.

template <typename T>
struct AdamwFactors {
    T clip, keep, beta1, beta2, rate, scale, eps;  // scale: 1 / sqrt(1 - beta2^t)
};

template <typename T>
[[gnu::noinline]] T adamw_part(T* w, const T* gradient, T* m, T* v, int64_t n, const AdamwFactors<T> f) {
    T squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; i++) {
        const T g = gradient[i] * f.clip, first = m[i] + (1 - f.beta1) * (g - m[i]),
                second = f.beta2 * v[i] + (1 - f.beta2) * g * g,
                x = f.keep * w[i] - f.rate * first / (std::sqrt(second) * f.scale + f.eps);
        m[i] = first;
        v[i] = second;
        w[i] = x;
        squares += x * x + first * first + second * second;
    }
    return squares;
}

bool adamw_(at::TensorList weights, at::TensorList gradients, at::TensorList firsts, at::TensorList seconds,
            at::TensorList steps, double clip, double rate, double beta1, double beta2, double eps, double decay) {
    constexpr int64_t PART = 4096;
    std::vector<std::pair<int64_t, int64_t>> parts;  // tensor, first element
    std::vector<double> counts;
    for (size_t i = 0; i < weights.size(); i++) {
        counts.push_back(*steps[i].data_ptr<float>() += 1);
        for (int64_t first = 0; first < weights[i].numel(); first += PART) parts.emplace_back(int64_t(i), first);
    }
    std::vector<double> sums(parts.size());
    at::parallel_for(0, int64_t(parts.size()), 8, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const auto [t, at] = parts[i];
            const int64_t n = std::min(PART, weights[t].numel() - at);
            const double one = 1 - std::pow(beta1, counts[t]), two = 1 - std::pow(beta2, counts[t]);
            HEDDLE_DISPATCH(weights[t], S, using T = Wide<S>;
                            const AdamwFactors<T> f{T(clip), T(1 - rate * decay), T(beta1), T(beta2), T(rate / one),
                                                    T(1 / std::sqrt(two)), T(eps)};
                            sums[i] = adamw_part<T>(weights[t].data_ptr<T>() + at, gradients[t].data_ptr<T>() + at,
                                                    firsts[t].data_ptr<T>() + at, seconds[t].data_ptr<T>() + at, n, f))
        }
    });
    double total = 0;
    for (const double sum : sums) total += sum;
    return std::isfinite(total);
}

TORCH_LIBRARY_FRAGMENT(heddle, m) {
    m.def("rms_norm(Tensor x, Tensor? weight, float eps, float offset, bool before) -> Tensor", &rms_norm);
    m.def("swiglu(Tensor gate, Tensor up) -> Tensor", &swiglu);
    m.def("rotary(Tensor x, Tensor cosines, Tensor sines, bool half) -> Tensor", &rotary);
    m.def("cross_entropy_(Tensor(a!) logits, Tensor targets, float scale, float weight, bool gradients) -> Tensor",
          &cross_entropy_);
    m.def("norms(Tensor[] tensors) -> Tensor", &norms);
    m.def(
        "adamw_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] firsts, Tensor(c!)[] seconds, "
        "Tensor(d!)[] steps, float clip, float rate, float beta1, float beta2, float eps, float decay) -> bool",
        &adamw_);
    m.def("weighted_swiglu_backward(Tensor gate, Tensor up, Tensor dh, Tensor w) -> (Tensor, Tensor, Tensor, Tensor)",
          &weighted_swiglu_backward);
}

}  // namespace heddle
