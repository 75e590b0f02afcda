// A decoding step of a whole sublayer in one call: one new token for each of n sequences, a few of them, from the norm in front of
// the sublayer to its last map. Numbers between are float32; tokens come and go in the model's type. Part of cpu.cpp, which
// includes it inside its namespace.
//
// Threads are started once a call. What follows a wait needs what all threads did before it; what is short, every thread does
// for itself instead of waiting for another. Sums run in the same order whatever n and the number of threads are.

// A linear map: weight [rows, columns] by `kind` as for palimpsest_few, bias [rows] or null. Without a weight there is no map.
struct Map {
    const void *weight;
    const uint16_t *scale;
    const void *bias;
    int64_t rows, columns;
    int32_t kind, bias_is_half;
};

// float32 or, is_half, bfloat16.
struct Numbers {
    const void *data;
    int64_t is_half;
};

// (x - mean) / sqrt(variance + eps) * weight + bias; `centred` or with a mean of 0; bias may be null. Without a weight: no norm.
struct Norm {
    Numbers weight, bias;
    float eps;
    int32_t centred;
};

// gate [rows], up [rows] -> what goes into the last map of an MLP.
struct Activation {
    int32_t form;  // 0: gelu(up), 1: silu(gate) up, 2: SiTU
    float beta, linear_beta;
};

INLINE vec vector_of(const Numbers &x, int64_t i) { return x.is_half ? wide((const uint16_t *)x.data + i) : load((const float *)x.data + i); }
INLINE float number_of(const Numbers &x, int64_t i) { return x.is_half ? widened(((const uint16_t *)x.data)[i]) : ((const float *)x.data)[i]; }

// The first `count` lanes, the others as they were: the end of a row that is no whole number of vectors.
INLINE void store_some(float *p, vec x, int64_t count) { std::memcpy(p, &x, count * 4); }

// y [n, columns]; x may be y. Every thread calls it for itself.
void normalise(const Norm &norm, const Numbers &x, float *y, int64_t n, int64_t columns) {
    for (int64_t t = 0; t < n; ++t, y += columns) {
        int64_t at = t * columns, i = 0;
        vec sum = {}, square = {};
        for (i = 0; i + LANES <= columns; i += LANES) {
            vec here = vector_of(x, at + i);
            store(y + i, here);
            sum += here;
        }
        float mean = total(sum);
        for (; i < columns; ++i) mean += y[i] = number_of(x, at + i);
        mean = norm.centred ? mean / columns : 0;
        for (i = 0; i + LANES <= columns; i += LANES) square += (load(y + i) - all(mean)) * (load(y + i) - all(mean));
        float squares = total(square);
        for (; i < columns; ++i) squares += (y[i] - mean) * (y[i] - mean);
        float factor = 1 / std::sqrt(squares / columns + norm.eps);
        for (i = 0; i + LANES <= columns; i += LANES) {
            vec z = (load(y + i) - all(mean)) * all(factor) * vector_of(norm.weight, i);
            store(y + i, norm.bias.data ? z + vector_of(norm.bias, i) : z);
        }
        for (; i < columns; ++i)
            y[i] = (y[i] - mean) * factor * number_of(norm.weight, i) + (norm.bias.data ? number_of(norm.bias, i) : 0);
    }
}

const int64_t FEW = 16;  // rows of x that read the weights again for every four of them at no loss; a step has no more

// y [n, rows] = x [n, columns] W^T + bias. Called by all threads, which share the rows; none waits at the end.
__attribute__((noinline)) void product(const Map &m, const float *x, float *y, int64_t n) {
    if (!m.weight || n == 0) return;
    if (n > FEW && m.rows >= LANES && !m.bias) return many_rows(m.kind, m.weight, m.scale, x, y, n, m.rows, m.columns);
    // A row and the one half a matrix behind it: two streams, each long enough that the processor reads ahead in it.
    int64_t half = (m.rows + 1) / 2;
    Numbers bias = {m.bias, m.bias_is_half};
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < half; ++row) {
        int64_t t = 0, ahead = row + half < m.rows ? half : 0, start = row * m.columns;
        for (; t + 4 <= n; t += 4)
            any_rows<4>(m.kind, m.weight, m.scale, start, ahead, x + t * m.columns, y + t * m.rows + row, m.columns, m.rows);
        for (; t < n; ++t)
            any_rows<1>(m.kind, m.weight, m.scale, start, ahead, x + t * m.columns, y + t * m.rows + row, m.columns, m.rows);
        if (!m.bias) continue;
        for (t = 0; t < n; ++t) {
            y[t * m.rows + row] += number_of(bias, row);
            if (ahead) y[t * m.rows + row + ahead] += number_of(bias, row + ahead);
        }
    }
}

// Two maps one behind the other, of which the first may be missing: its part before the wait, and what is behind it.
INLINE void low(const Map &a, const Map &b, const float *x, float *middle, float *y, int64_t n) {
    a.weight ? product(a, x, middle, n) : product(b, x, y, n);
}
INLINE void high(const Map &a, const Map &b, const float *middle, float *y, int64_t n) {
    if (a.weight) product(b, middle, y, n);
}

// x [count] <- x * sigmoid(gate), or x * silu(gate).
INLINE void open_gate(float *x, const float *gate, int64_t count, bool is_silu) {
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t some = lanes(i, count);
        vec z = load_some(gate + i, some), s = sigmoid_of(z);
        store_some(x + i, load_some(x + i, some) * (is_silu ? z * s : s), some);
    }
}

// Channel i turns with channel i + half by position * theta^(-i / half): the same for all heads, so found once a call.
struct Turns {
    int64_t half;
    Floats cosines, sines;  // [n, half]
    Turns(const int64_t *past, int64_t n, double theta, int64_t channels) : half(channels / 2), cosines(n * half), sines(n * half) {
        for (int64_t i = 0; i < half; ++i) {
            double rate = std::pow(theta, -(double)i / half);
            for (int64_t t = 0; t < n; ++t) {
                cosines[t * half + i] = std::cos(past[t] * rate);
                sines[t * half + i] = std::sin(past[t] * rate);
            }
        }
    }
    // x: the channels of one head of token t.
    void apply(float *x, int64_t t) const {
        for (int64_t i = 0; i < half; ++i) {
            float c = cosines[t * half + i], s = sines[t * half + i], first = x[i], second = x[i + half];
            x[i] = first * c - second * s;
            x[i + half] = second * c + first * s;
        }
    }
};

// tanh to about 1e-7 of itself: a continued fraction near 0, where the quotient of exponentials loses digits.
INLINE vec tanh_of(vec x) {
    vec s = x * x, e = exp_of(x + x);
    vec near = x / (all(1.0f) + s / (all(3.0f) + s / (all(5.0f) + s / (all(7.0f) + s / all(9.0f)))));
    return choose(s < all(0.36f), near, all(1.0f) - all(2.0f) / (e + all(1.0f)));
}

// up [count] <- what the activation makes of gate and up. Called by all threads, which share the work; none waits at the end.
void activate(const Activation &a, const float *gate, float *up, int64_t count) {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t some = lanes(i, count);
        vec u = load_some(up + i, some), y;
        if (a.form == 0) {
            y = u * sigmoid_of(all(1.5957691216f) * (u + all(0.044715f) * u * u * u));  // (1 + tanh z) / 2 = sigmoid(2 z)
        } else {
            vec g = load_some(gate + i, some), s = sigmoid_of(g);
            if (a.form == 1) y = g * s * u;
            else y = all(a.beta) * tanh_of(g / all(a.beta)) * s * all(a.linear_beta) * tanh_of(u / all(a.linear_beta));
        }
        store_some(up + i, y, some);
    }
}

// The tokens that come and go: x and y [n, D] in float32 or, is_half, bfloat16.
struct Tokens {
    const void *x;
    void *y;
    int64_t n;
    int32_t is_half, threads, stream;  // stream: a recurrent memory is larger than the caches, and aligned
    Numbers in() const { return {x, is_half}; }
    void put(const float *from, int64_t width) const {
        if (!is_half) return;
        for (int64_t i = 0; i < n * width; ++i) narrow(from[i], (uint16_t *)y + i);
    }
};

// Where the last map writes: y itself, or float32 numbers beside it.
struct Result {
    Floats beside;
    float *data;
    Result(const Tokens &a, int64_t width) : beside(a.is_half ? a.n * width : 0), data(a.is_half ? beside.data : (float *)a.y) {}
};

// ------------------------------------------------------------------------------------------------------- recurrent memories

struct Recurrence {
    Norm norm, o_norm;
    Map q, k, v, decay_low, decay, gate_low, gate, beta, out;
    const float *taps[3];  // of q, k and v, [channels, window] each; window 0: no convolution
    Form form;
    int64_t heads, value_heads, key_dim, value_dim, window;
    int32_t is_silu;
    float strongest;  // what a write strength of 1 stands for
};

// `count` channels x of one sequence through their taps and SiLU. before, after [window - 1, pitch]: the inputs of the tokens before.
template <typename Number>
void convolve(const float *taps, float *x, const Number *before, Number *after, int64_t count, int64_t pitch, int64_t window) {
    for (int64_t c = 0; c < count; ++c) {
        Number now;
        narrow(x[c], &now);
        float sum = 0;
        for (int64_t j = 0; j + 1 < window; ++j) sum += taps[c * window + j] * widened(before[j * pitch + c]);
        for (int64_t j = 0; j + 2 < window; ++j) after[j * pitch + c] = before[(j + 1) * pitch + c];
        if (window > 1) after[(window - 2) * pitch + c] = now;
        x[c] = sum + taps[c * window + window - 1] * widened(now);
    }
    open_gate(x, x, count, false);  // SiLU
}

// All three parts; threads share the channels.
template <typename Number>
void convolve_all(const Recurrence &m, float *const parts[3], const Number *before, Number *after, int64_t n) {
    const int64_t sizes[3] = {m.q.rows, m.k.rows, m.v.rows}, piece = 64;
    int64_t pitch = sizes[0] + sizes[1] + sizes[2], part_first = 0;
    for (int part = 0; part < 3; part_first += sizes[part++]) {
        int64_t pieces = (sizes[part] + piece - 1) / piece;
#pragma omp for schedule(static) nowait
        for (int64_t item = 0; item < n * pieces; ++item) {
            int64_t t = item / pieces, first = item % pieces * piece, left = sizes[part] - first;
            int64_t at = t * (m.window - 1) * pitch + part_first + first;
            convolve(m.taps[part] + first * m.window, parts[part] + t * sizes[part] + first, before + at, after + at,
                     left < piece ? left : piece, pitch, m.window);
        }
    }
}

// matrix, final [n, HV, K, V]; before, after [n, window - 1, C].
void recurrent_step(const Recurrence &m, const Tokens &a, const float *matrix, float *final, const void *before, void *after) {
    int64_t n = a.n, width = m.q.columns, size = m.key_dim * m.value_dim, blocks = (m.value_dim + BLOCK - 1) / BLOCK;
    Shape shape = {n, 1, m.heads, m.value_heads, m.key_dim, m.value_dim};
    Form form = m.form;
    form.stream = a.stream;
    Floats q(n * m.q.rows), k(n * m.k.rows), v(n * m.v.rows), o(n * m.v.rows), beta(n * m.value_heads);
    Floats decay_low(n * m.decay_low.rows), decay(n * m.decay.rows), gate_low(n * m.gate_low.rows), gate(n * m.gate.rows);
    Result result(a, width);
    float *const parts[3] = {q, k, v};
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        FlushSubnormals flush;
        Floats x(n * width), memory(m.value_dim % BLOCK ? blocks * m.key_dim * BLOCK : 0);
        normalise(m.norm, a.in(), x, n, width);
        product(m.q, x, q, n);
        product(m.k, x, k, n);
        product(m.v, x, v, n);
        low(m.decay_low, m.decay, x, decay_low, decay, n);
        low(m.gate_low, m.gate, x, gate_low, gate, n);
        product(m.beta, x, beta, n);
#pragma omp barrier
        high(m.decay_low, m.decay, decay_low, decay, n);
        high(m.gate_low, m.gate, gate_low, gate, n);
        if (m.window && a.is_half) convolve_all(m, parts, (const uint16_t *)before, (uint16_t *)after, n);
        if (m.window && !a.is_half) convolve_all(m, parts, (const float *)before, (float *)after, n);
#pragma omp barrier
        Token token;
#pragma omp for schedule(static)
        for (int64_t item = 0; item < n * m.value_heads; ++item) {
            int64_t t = item / m.value_heads, head = item % m.value_heads;
            float *own = o + item * m.value_dim;
            beta[item] = m.strongest * sigmoid(beta[item]);
            forward_head(shape, form, q, k, v, decay, beta, matrix + item * size, o, final + item * size, nullptr, 0, t, 1, head,
                         memory, &token);
            normalise(m.o_norm, {own, 0}, own, 1, m.value_dim);
            if (m.gate.weight) open_gate(own, gate + item * m.value_dim, m.value_dim, m.is_silu);
        }
        product(m.out, o, result.data, n);
    }
    a.put(result.data, width);
}

// ------------------------------------------------------------------------------------------------------- keys and values

struct Attention {
    Norm norm, q_norm, k_norm;
    Map q, k, v, gate, out;
    int64_t heads, key_heads, dim, rotated;
    double theta;
};

// The new keys and values of sequence t, head by head, behind its rows; and its queries made ready.
template <typename Number>
void place_rows(const Attention &m, const Cache &c, const Turns &turns, float *q, float *k, const float *v, const int64_t *past,
                int64_t n) {
    int64_t all_heads = m.heads + 2 * m.key_heads;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < n * all_heads; ++item) {
        int64_t t = item / all_heads, head = item % all_heads;
        bool is_query = head < m.heads, is_key = !is_query && head < m.heads + m.key_heads;
        int64_t own = is_query ? head : is_key ? head - m.heads : head - m.heads - m.key_heads;
        float *x = is_query ? q + (t * m.heads + own) * m.dim : k + (t * m.key_heads + own) * m.dim;
        if (is_query || is_key) {
            const Norm &norm = is_query ? m.q_norm : m.k_norm;
            if (norm.weight.data) normalise(norm, {x, 0}, x, 1, m.dim);
            turns.apply(x, t);
        }
        if (is_query) continue;
        const float *from = is_key ? x : v + (t * m.key_heads + own) * m.dim;
        Number *to = is_key ? (Number *)c.keys + t * c.key_batch + past[t] * c.key_row + own * c.key_head
                            : (Number *)c.values + t * c.value_batch + past[t] * c.value_row + own * c.value_head;
        for (int64_t i = 0; i < m.dim; ++i) narrow(from[i], to + i);
    }
}

// past [n]: the rows that each sequence has in the cache, behind which there is room for one more.
template <typename Number>
void attention_step(const Attention &m, const Tokens &a, const Cache &cache, const int64_t *past) {
    int64_t n = a.n, width = m.q.columns, queries = m.heads * m.dim;
    Query query = {n, m.heads, m.key_heads, m.dim, m.dim, 1 / std::sqrt((float)m.dim), 0};
    Parts parts(query, past, 1);
    Floats q(n * queries), k(n * m.k.rows), v(n * m.v.rows), gate(n * m.gate.rows), o(n * queries);
    Turns turns(past, n, m.theta, m.rotated);
    Result result(a, width);
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        FlushSubnormals flush;
        Floats x(n * width);
        normalise(m.norm, a.in(), x, n, width);
        product(m.q, x, q, n);
        product(m.k, x, k, n);
        product(m.v, x, v, n);
        product(m.gate, x, gate, n);
#pragma omp barrier
        place_rows<Number>(m, cache, turns, q, k, v, past, n);
        attend_parts<Number>(query, cache, parts, q);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < n * m.heads; ++item) {
            join_parts(query, parts, item / m.heads, item % m.heads, o + item * m.dim);
            if (m.gate.weight) open_gate(o + item * m.dim, gate + item * m.dim, m.dim, false);
        }
        product(m.out, o, result.data, n);
    }
    a.put(result.data, width);
}

// ------------------------------------------------------------------------------------------------------- latents

struct Latents {
    Norm norm, q_norm, latent_norm;
    Map q_low, q, kv_a, kv_b, gate, out;
    int64_t heads, rank, nope, rope, value_dim;
    double theta;  // 0: no rotation
};

// As above, in the absorbed form; rows [c | p] in the cache are the keys, and their c the values.
template <typename Number>
void latent_step(const Latents &m, const Tokens &a, const Cache &cache, const int64_t *past) {
    int64_t n = a.n, width = m.kv_a.columns, row = m.rank + m.rope, channels = m.nope + m.rope, per_head = m.nope + m.value_dim;
    Query query = {n, m.heads, 1, row, m.rank, 1 / std::sqrt((float)channels), 0};
    Parts parts(query, past, 1);
    Floats q_low(n * m.q_low.rows), q(n * m.q.rows), fresh(n * row), gate(n * m.gate.rows), absorbed(n * m.heads * row);
    Floats contexts(n * m.heads * m.rank), o(n * m.heads * m.value_dim);
    Turns turns(past, n, m.theta, m.theta > 0 ? m.rope : 0);
    Result result(a, width);
    const Number *up = (const Number *)m.kv_b.weight;  // [H, nope + V, R]
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        FlushSubnormals flush;
        Floats x(n * width), middle(n * m.q_low.rows);
        normalise(m.norm, a.in(), x, n, width);
        low(m.q_low, m.q, x, q_low, q, n);
        product(m.kv_a, x, fresh, n);
        product(m.gate, x, gate, n);
#pragma omp barrier
        if (m.q_low.weight) normalise(m.q_norm, {q_low, 0}, middle, n, m.q_low.rows);
        high(m.q_low, m.q, middle, q, n);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < n; ++t) {
            float *c = fresh + t * row;
            normalise(m.latent_norm, {c, 0}, c, 1, m.rank);
            turns.apply(c + m.rank, t);
            Number *to = (Number *)cache.keys + t * cache.key_batch + past[t] * cache.key_row;
            for (int64_t i = 0; i < row; ++i) narrow(c[i], to + i);
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < n * m.heads; ++item) {
            float *from = q + item * channels, *to = absorbed + item * row;
            turns.apply(from + m.nope, item / m.heads);
            std::memset(to, 0, m.rank * 4);
            gather(from, up + item % m.heads * per_head * m.rank, m.rank, m.nope, m.rank, to);
            std::memcpy(to + m.rank, from + m.nope, m.rope * 4);
        }
        attend_parts<Number>(query, cache, parts, absorbed);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < n * m.heads; ++item) {
            float *context = contexts + item * m.rank, *to = o + item * m.value_dim;
            const Number *weight = up + (item % m.heads * per_head + m.nope) * m.rank;
            join_parts(query, parts, item / m.heads, item % m.heads, context);
            for (int64_t i = 0, half = (m.value_dim + 1) / 2; i < half; ++i)
                plain_rows<1>(weight + i * m.rank, i + half < m.value_dim ? half : 0, context, to + i, m.rank, m.value_dim);
            if (m.gate.weight) open_gate(to, gate + item * m.value_dim, m.value_dim, false);
        }
        product(m.out, o, result.data, n);
    }
    a.put(result.data, width);
}

// ------------------------------------------------------------------------------------------------------- MLPs

struct Mlp {
    Norm norm;
    Map gate, up, down;
    Activation activation;
};

void mlp_step(const Mlp &m, const Tokens &a) {
    int64_t n = a.n, width = m.up.columns;
    Floats gate(n * m.gate.rows), up(n * m.up.rows);
    Result result(a, width);
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        Floats x(n * width);
        normalise(m.norm, a.in(), x, n, width);
        product(m.gate, x, gate, n);
        product(m.up, x, up, n);
#pragma omp barrier
        activate(m.activation, gate, up, n * m.up.rows);
#pragma omp barrier
        product(m.down, up, result.data, n);
    }
    a.put(result.data, width);
}

// ------------------------------------------------------------------------------------------------------- experts

struct Experts {
    Norm norm, latent_norm;
    Map router, latent_down, gate, up, down, latent_up;  // gate, up, down: those of the first expert, the others behind it
    Map shared_gate, shared_up, shared_down, shared_open;
    const float *selection;  // [E], what is added before choosing
    int64_t count, top_k;
    Activation activation;
    float factor;
    int32_t is_softmax, renormalise;
};

INLINE Map expert(const Map &stack, int64_t number) {
    const int64_t sizes[] = {4, 2, 1};
    Map one = stack;
    int64_t at = number * stack.rows * stack.columns;
    one.weight = (const char *)stack.weight + at * sizes[stack.kind];
    if (stack.scale) one.scale = stack.scale + at / 32;
    return one;
}

// Scores of one token from its logits, in place; the best top_k by score + selection, best first; and their weights.
INLINE void route(const Experts &m, float *scores, float *taken, int64_t *chosen, float *weights) {
    float largest = scores[0], sum = 0;
    for (int64_t e = 0; e < m.count; ++e) largest = scores[e] > largest ? scores[e] : largest;
    for (int64_t e = 0; e < m.count; ++e) sum += scores[e] = m.is_softmax ? std::exp(scores[e] - largest) : sigmoid(scores[e]);
    for (int64_t e = 0; m.is_softmax && e < m.count; ++e) scores[e] /= sum;
    float whole = 0;
    std::memset(taken, 0, m.count * 4);
    for (int64_t rank = 0; rank < m.top_k; ++rank) {
        int64_t best = -1;  // some expert even where all scores are NaN
        for (int64_t e = 0; e < m.count; ++e)
            if (taken[e] == 0 && (best < 0 || scores[e] + m.selection[e] > scores[best] + m.selection[best])) best = e;
        chosen[rank] = best;
        taken[best] = 1;
        whole += weights[rank] = scores[best];
    }
    for (int64_t rank = 0; rank < m.top_k; ++rank) weights[rank] *= m.renormalise ? m.factor / (whole + 1e-20f) : m.factor;
}

// Which rows of which tokens each expert is given: pair (token, rank) stands at `place`, behind those of smaller experts.
struct Routes {
    Floats weights, scores, taken;
    int64_t *chosen, *place, *first;  // [n, k], [n, k], [E + 1]
    Routes(const Experts &m, int64_t n) : weights(n * m.top_k), scores(m.count), taken(m.count) {
        chosen = (int64_t *)aligned(2 * (2 * n * m.top_k + m.count + 2));
        place = chosen + n * m.top_k;
        first = place + n * m.top_k;
    }
    ~Routes() { std::free(chosen); }
    void find(const Experts &m, const float *logits, int64_t n) {
        std::memset(first, 0, (m.count + 2) * 8);
        for (int64_t t = 0; t < n; ++t) {
            std::memcpy(scores, logits + t * m.count, m.count * 4);
            route(m, scores, taken, chosen + t * m.top_k, weights + t * m.top_k);
        }
        for (int64_t i = 0; i < n * m.top_k; ++i) ++first[chosen[i] + 2];
        for (int64_t e = 0; e < m.count; ++e) first[e + 2] += first[e + 1];
        for (int64_t i = 0; i < n * m.top_k; ++i) place[i] = first[chosen[i] + 1]++;
    }
};

void experts_step(const Experts &m, const Tokens &a) {
    int64_t n = a.n, width = m.router.columns, narrow_width = m.gate.columns, pairs = n * m.top_k, inner = m.gate.rows;
    Floats logits(n * m.count), latent(n * m.latent_down.rows), shared_gate(n * m.shared_gate.rows), shared_up(n * m.shared_up.rows);
    Floats shared(n * m.shared_down.rows), open(n), gate(pairs * inner), up(pairs * inner), out(pairs * narrow_width);
    Result result(a, width);
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        Floats x(n * width), rows(pairs * narrow_width), sum(n * narrow_width);
        Routes routes(m, n);
        normalise(m.norm, a.in(), x, n, width);
        product(m.router, x, logits, n);
        product(m.latent_down, x, latent, n);
        product(m.shared_gate, x, shared_gate, n);
        product(m.shared_up, x, shared_up, n);
        product(m.shared_open, x, open, n);
#pragma omp barrier
        routes.find(m, logits, n);
        const float *in = m.latent_down.weight ? latent : x;
        for (int64_t i = 0; i < pairs; ++i)
            std::memcpy(rows + routes.place[i] * narrow_width, in + i / m.top_k * narrow_width, narrow_width * 4);
        for (int64_t e = 0; e < m.count; ++e) {
            int64_t first = routes.first[e], count = routes.first[e + 1] - first;
            product(expert(m.gate, e), rows + first * narrow_width, gate + first * inner, count);
            product(expert(m.up, e), rows + first * narrow_width, up + first * inner, count);
        }
        activate(m.activation, shared_gate, shared_up, n * m.shared_up.rows);
#pragma omp barrier
        activate(m.activation, gate, up, pairs * inner);
        product(m.shared_down, shared_up, shared, n);
#pragma omp barrier
        for (int64_t e = 0; e < m.count; ++e) {
            int64_t first = routes.first[e];
            product(expert(m.down, e), up + first * inner, out + first * narrow_width, routes.first[e + 1] - first);
        }
#pragma omp barrier
        std::memset(sum, 0, n * narrow_width * 4);
        for (int64_t i = 0; i < pairs; ++i)
            for (int64_t c = 0; c < narrow_width; ++c)
                sum[i / m.top_k * narrow_width + c] += routes.weights[i] * out[routes.place[i] * narrow_width + c];
        if (m.latent_norm.weight.data) normalise(m.latent_norm, {sum, 0}, sum, n, narrow_width);
        product(m.latent_up, sum, result.data, n);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t t = 0; t < n; ++t) {
            float share = m.shared_open.weight ? sigmoid(open[t]) : 1;
            for (int64_t c = t * width; c < (t + 1) * width; ++c)
                result.data[c] = (m.latent_up.weight ? result.data[c] : sum[c]) + (m.shared_up.weight ? share * shared[c] : 0);
        }
    }
    a.put(result.data, width);
}

// ------------------------------------------------------------------------------------------------------- one after another

// A sublayer by the kind of its weights, and its memory: matrix and convolution before and after the token, or the rows of the past.
struct Sublayer {
    const void *weights;
    const void *before[2];
    void *after[2];
    Cache cache;
    int32_t kind, is_large, stream;
};

void sublayer_step(const Sublayer &s, Tokens a, const int64_t *past) {
    if (!s.is_large) a.threads = 1;
    a.stream = s.stream;
    switch (s.kind) {
        case 0:
            return recurrent_step(*(const Recurrence *)s.weights, a, (const float *)s.before[0], (float *)s.after[0], s.before[1], s.after[1]);
        case 1:
            return a.is_half ? attention_step<uint16_t>(*(const Attention *)s.weights, a, s.cache, past)
                             : attention_step<float>(*(const Attention *)s.weights, a, s.cache, past);
        case 2:
            return a.is_half ? latent_step<uint16_t>(*(const Latents *)s.weights, a, s.cache, past)
                             : latent_step<float>(*(const Latents *)s.weights, a, s.cache, past);
        case 3: return mlp_step(*(const Mlp *)s.weights, a);
        default: return experts_step(*(const Experts *)s.weights, a);
    }
}

// x += y, each sum in the type of the two.
template <typename Number>
void add(Number *x, const Number *y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) narrow(widened(x[i]) + widened(y[i]), x + i);
}
