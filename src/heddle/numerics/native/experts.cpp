// The chosen experts of a few tokens: rows of weights are read once, by all threads. See `heddle.numerics.experts`.
#include "tiles.h"

namespace heddle {

inline Lanes<double> load_wide(const double* from) { return load(from); }
inline Lanes<float> load_wide(const float* from) { return load(from); }
inline Lanes<float> load_wide(const at::BFloat16* from) {
    typedef uint16_t Narrow __attribute__((vector_size(32)));
    typedef uint32_t Bits __attribute__((vector_size(64)));
    Narrow narrow;
    std::memcpy(&narrow, from, 32);
    const Bits bits = __builtin_convertvector(narrow, Bits) << 16;
    Lanes<float> lanes;
    std::memcpy(&lanes, &bits, 64);
    return lanes;
}

// products[m] = rows[m] . x for up to TILE_ROWS adjacent rows.
template <typename T> void multiply_rows(const T* rows, int64_t count, const Wide<T>* x, int64_t width, Wide<T>* products) {
    using W = Wide<T>;
    const int64_t whole = width / LANES<W> * LANES<W>;
    Lanes<W> sums[TILE_ROWS] = {};
    if (count == TILE_ROWS) {
        for (int64_t i = 0; i < whole; i += LANES<W>) {
            const Lanes<W> factor = load(x + i);
#pragma GCC unroll 4
            for (int64_t m = 0; m < TILE_ROWS; m++) sums[m] += load_wide(rows + m * width + i) * factor;
        }
    } else {
        for (int64_t m = 0; m < count; m++)
            for (int64_t i = 0; i < whole; i += LANES<W>) sums[m] += load_wide(rows + m * width + i) * load(x + i);
    }
    W found[TILE_ROWS];
    sum_four<W>(sums[0], sums[1], sums[2], sums[3], found);
    for (int64_t m = 0; m < count; m++) {
        for (int64_t i = whole; i < width; i++) found[m] += wide(rows[m * width + i]) * x[i];
        products[m] = found[m];
    }
}

template <typename T> std::vector<Wide<T>> widened(const Tensor& x) {
    const T* from = x.const_data_ptr<T>();
    std::vector<Wide<T>> values(x.numel());
    for (int64_t i = 0; i < x.numel(); i++) values[i] = wide(from[i]);
    return values;
}

template <typename T>
void multiply_inputs(const Tensor& x, const Tensor& experts, const std::vector<Tensor>& weights, const std::vector<Tensor>& outputs) {
    const int64_t assignments = experts.numel(), hidden = weights[0].size(1), width = weights[0].size(2), maps = weights.size();
    const int64_t groups = (hidden + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t *expert = experts.const_data_ptr<int64_t>(), chosen = experts.size(1);
    const std::vector<Wide<T>> tokens = widened<T>(x);
    at::parallel_for(0, assignments * maps * groups, std::max<int64_t>(1, GRAIN / width), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t row = i % groups * TILE_ROWS, map = i / groups % maps, assignment = i / groups / maps;
            if (expert[assignment] < 0) continue;
            const T* rows = weights[map].const_data_ptr<T>() + (expert[assignment] * hidden + row) * width;
            const int64_t count = std::min(TILE_ROWS, hidden - row);
            Wide<T> products[TILE_ROWS];
            multiply_rows<T>(rows, count, tokens.data() + assignment / chosen * width, width, products);
            for (int64_t m = 0; m < count; m++) outputs[map].data_ptr<T>()[assignment * hidden + row + m] = narrow<T>(products[m]);
        }
    });
}

// x [N, width], experts [N, k], each weight [E, hidden, width] -> for each weight [N k, hidden], zero where dropped.
std::vector<Tensor> experts_inputs(const Tensor& x, const Tensor& experts, at::TensorList weights) {
    std::vector<Tensor> maps, outputs;
    for (const Tensor& weight : weights) {
        maps.push_back(weight.contiguous());
        outputs.push_back(at::zeros({experts.numel(), weight.size(1)}, x.options()));
    }
    const Tensor tokens = x.contiguous(), chosen = experts.contiguous();
    HEDDLE_DISPATCH(tokens, T, multiply_inputs<T>(tokens, chosen, maps, outputs))
    return outputs;
}

template <typename T> void multiply_outputs(const Tensor& hidden, const Tensor& experts, const Tensor& gates, const Tensor& down, Tensor& out) {
    const int64_t tokens = experts.size(0), chosen = experts.size(1), width = down.size(1), inner = down.size(2);
    const int64_t groups = (width + TILE_ROWS - 1) / TILE_ROWS, *expert = experts.const_data_ptr<int64_t>();
    const std::vector<Wide<T>> rows = widened<T>(hidden), factors = widened<T>(gates);
    const T* weights = down.const_data_ptr<T>();
    T* y = out.data_ptr<T>();
    at::parallel_for(0, tokens * groups, std::max<int64_t>(1, GRAIN / (inner * chosen)), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t token = i / groups, row = i % groups * TILE_ROWS, count = std::min(TILE_ROWS, width - row);
            Wide<T> sums[TILE_ROWS] = {}, products[TILE_ROWS];
            for (int64_t j = token * chosen; j < (token + 1) * chosen; j++) {
                if (expert[j] < 0) continue;
                multiply_rows<T>(weights + (expert[j] * width + row) * inner, count, rows.data() + j * inner, inner, products);
                for (int64_t m = 0; m < count; m++) sums[m] += factors[j] * products[m];
            }
            for (int64_t m = 0; m < count; m++) y[token * width + row + m] = narrow<T>(sums[m]);
        }
    });
}

// hidden [N k, hidden], experts and gates [N, k], down [E, width, hidden] -> sums over each token's experts, [N, width].
Tensor experts_outputs(const Tensor& hidden, const Tensor& experts, const Tensor& gates, const Tensor& down) {
    Tensor out = at::empty({experts.size(0), down.size(1)}, hidden.options());
    const Tensor rows = hidden.contiguous(), chosen = experts.contiguous(), factors = gates.contiguous(), weights = down.contiguous();
    HEDDLE_DISPATCH(rows, T, multiply_outputs<T>(rows, chosen, factors, weights, out))
    return out;
}

TORCH_LIBRARY_FRAGMENT(heddle, m) {
    m.def("experts_inputs(Tensor x, Tensor experts, Tensor[] weights) -> Tensor[]");
    m.impl("experts_inputs", torch::dispatch(c10::DispatchKey::CPU, &experts_inputs));
    m.def("experts_outputs(Tensor hidden, Tensor experts, Tensor gates, Tensor down) -> Tensor");
    m.impl("experts_outputs", torch::dispatch(c10::DispatchKey::CPU, &experts_outputs));
}

}  // namespace heddle
