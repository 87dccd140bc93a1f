// Passes over rows that read and write each element once.
#include "common.h"

namespace heddle {

// RMSNorm: y = g x / sqrt(mean(x^2) + eps), g [width] or none, in the wide type; see `heddle.numerics.norms.reference`.
// rounds: y is rounded to the storage type before it is multiplied by g.

template <typename T>
void rms_norm_rows(const T* x, const Wide<T>* g, T* y, Wide<T>* scales, int64_t rows, int64_t width, double eps, bool rounds) {
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
void rms_norm_backward_rows(const T* x, const Wide<T>* g, const Wide<T>* scales, const T* dy, T* dx, Wide<T>* dg, int64_t rows, int64_t width) {
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
                    for (int64_t i = 0; i < width; i++) out[i] = narrow<T>(scale * (g[i] * wide(up[i]) - c * wide(in[i])));
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

inline at::ScalarType wide_type(const Tensor& x) {
    return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

struct RMSNorm : torch::autograd::Function<RMSNorm> {
    static Tensor forward(AutogradContext* ctx, const Tensor& input, const optional<Tensor>& weight, double eps, double offset, bool before) {
        const Tensor x = input.contiguous();
        const int64_t width = x.size(-1), rows = width ? x.numel() / width : 0;
        Tensor g, y = at::empty_like(x), scales = at::empty({rows}, x.options().dtype(wide_type(x)));
        if (weight) {
            g = *weight;
            if (before) g = (offset ? at::add(g, offset) : g).to(x.scalar_type()).to(scales.scalar_type());
            else g = offset ? at::add(g.to(scales.scalar_type()), offset) : g.to(scales.scalar_type());
            g = g.contiguous();
        }
        HEDDLE_DISPATCH(x, T, rms_norm_rows<T>(x.const_data_ptr<T>(), g.defined() ? g.const_data_ptr<Wide<T>>() : nullptr,
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
        HEDDLE_DISPATCH(x, T, rms_norm_backward_rows<T>(x.const_data_ptr<T>(), g.defined() ? g.const_data_ptr<Wide<T>>() : nullptr,
            scales.const_data_ptr<Wide<T>>(), dy.const_data_ptr<T>(), dx.data_ptr<T>(), dg.defined() ? dg.data_ptr<Wide<T>>() : nullptr,
            scales.numel(), x.size(-1)))
        if (dg.defined()) dg = dg.to(at::ScalarType(ctx->saved_data["weight"].toInt()));
        return {dx, dg, Tensor(), Tensor(), Tensor()};
    }
};

Tensor rms_norm(const Tensor& x, const optional<Tensor>& weight, double eps, double offset, bool before) {
    return RMSNorm::apply(x, weight, eps, offset, before);
}

TORCH_LIBRARY_FRAGMENT(heddle, m) {
    m.def("rms_norm(Tensor x, Tensor? weight, float eps, float offset, bool before) -> Tensor", &rms_norm);
}

}  // namespace heddle
