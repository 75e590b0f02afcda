// The recurrence on a CPU, token by token with the memory in the first-level cache.
//
// Columns of S [K, V] do not see one another: column v needs k, q, g, beta and its own v_t. So S is cut into blocks of 32
// columns, K x 32 floats that stay in L1 while the tokens of a tile pass, and a whole token costs one sweep over the block:
//
//     s = exp(g_k) S[k] + k_k u        S[k] <- s        o += q_k s        r' += k'_k exp(g'_k) s
//
// where u = beta (v - r), r is what the token's key retrieves, and r' is already that of the token behind it. The work is
// 8 K V operations a token, no more than the chunked form's, with every operand in cache and nothing that could overflow.
//
// Plain C interface; shapes as in palimpsest/ops/__init__.py, everything contiguous float32. Built by hatch_build.py.

#include <cmath>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <cstdint>
#include <cstring>
#include <cstdlib>
#include <initializer_list>

#define INLINE static inline __attribute__((always_inline))

// Vectors as wide as the registers: wider ones compile to something very slow. A block's rows of o, r and u stay in registers.
#if defined(__AVX512F__)
#define BYTES 64
const int BLOCK = 32;
#elif defined(__AVX2__)
#define BYTES 32
const int BLOCK = 32;
#else
#define BYTES 16
const int BLOCK = 16;
#endif

typedef float vec __attribute__((vector_size(BYTES), aligned(BYTES)));
typedef float vec_u __attribute__((vector_size(BYTES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(BYTES)));

namespace {

const int LANES = BYTES / 4, VECTORS = BLOCK / LANES, TILE = 32, WIDEST = 256;

struct Shape {
    int64_t batch, tokens, heads, value_heads, key_dim, value_dim;
};

// How g, beta, q and k are given. gate: 0 none, 1 per channel, 2 per head; rate: null when g is a log decay already.
struct Form {
    int32_t gate, additive, norm, beta_is_logit, stream;  // stream: the final state is larger than the caches, and aligned
    float scale, lower_bound;  // lower_bound 0: the unbounded gate
    const float *rate, *bias;  // A_log [HV], dt_bias [HV*K or HV]
};

INLINE vec load(const float *p) { return *(const vec_u *)p; }
INLINE void store(float *p, vec x) { *(vec_u *)p = x; }
INLINE vec all(float x) { return x - (vec){}; }

INLINE float sigmoid(float x) {
    float e = std::exp(-std::fabs(x));
    return (x >= 0 ? 1 : e) / (1 + e);
}

INLINE vec choose(ivec where, vec yes, vec no) { return (vec)(((ivec)yes & where) | ((ivec)no & ~where)); }

// exp lane by lane, to about 1e-7: 2^n times a polynomial of the rest; 0 below -87, and no more than e^88.
INLINE vec exp_of(vec x) {
    ivec is_low = x < all(-87.0f);
    x = choose(is_low, all(-87.0f), choose(x > all(88.0f), all(88.0f), x));
    vec scaled = x * all(1.44269504f);
    ivec n = __builtin_convertvector(scaled + choose(scaled < all(0.0f), all(-0.5f), all(0.5f)), ivec);  // the nearest
    vec whole = __builtin_convertvector(n, vec);
    vec r = x - whole * all(0.693359375f) + whole * all(2.12194440e-4f);
    vec p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.0f);
    vec power = (vec)((n + 127) << 23);
    return (vec)((ivec)(p * power) & ~is_low);
}

// log(1 + e^x) to about 1e-7 of itself: log(1 + y) = 2 artanh(y / (2 + y)) with y = e^-|x| in (0, 1].
INLINE vec softplus_of(vec x) {
    vec y = exp_of(choose(x < all(0.0f), x, -x)), s = y / (y + all(2.0f)), square = s * s, p = all(2.0f / 13);
    p = p * square + all(2.0f / 11);
    p = p * square + all(2.0f / 9);
    p = p * square + all(2.0f / 7);
    p = p * square + all(2.0f / 5);
    p = p * square + all(2.0f / 3);
    p = p * square + all(2.0f);
    return choose(x > all(0.0f), x, all(0.0f)) + s * p;
}

INLINE vec sigmoid_of(vec x) { return all(1.0f) / (all(1.0f) + exp_of(-x)); }

// The first `count` <= LANES numbers at p, and zeros.
INLINE vec load_some(const float *p, int64_t count) {
    if (count == LANES) return load(p);
    vec x = {};
    for (int64_t l = 0; l < count; ++l) x[l] = p[l];
    return x;
}
INLINE int64_t lanes(int64_t from, int64_t end) { return end - from < LANES ? end - from : LANES; }

INLINE float total(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    for (int d = LANES / 2; d > 0; d /= 2)  // the order of AVX-512's own and of `sums`
        for (int l = 0; l < d; ++l) x[l] += x[l + d];
    return x[0];
#endif
}

// What one token's sweep needs, for one head: padded to whole vectors, q and k with zeros.
struct Token {
    float q[WIDEST], k[WIDEST], decay[WIDEST], probe[WIDEST];  // probe = k * decay
    float beta;
};

// to [padded dim] <- factor x, or factor x / sqrt(sum x^2 + 1e-6) when `norm`.
INLINE void ready(float *to, const float *x, int64_t dim, float factor, bool norm) {
    if (norm) {
        vec square = {};
        for (int64_t i = 0; i < dim; i += LANES) {
            vec here = load_some(x + i, lanes(i, dim));
            square += here * here;
        }
        factor /= std::sqrt(total(square) + 1e-6f);
    }
    for (int64_t i = 0; i < dim; i += LANES) store(to + i, load_some(x + i, lanes(i, dim)) * all(factor));
}

// The decay of a key's channels, [padded dim], from g: a log decay, or what the gate makes it of.
INLINE void fade(float *to, const Form &f, const float *g, int64_t head, int64_t dim) {
    int64_t channels = f.gate == 1 ? dim : 1;
    vec rate = all(f.rate ? std::exp(f.rate[head]) : 1);
    for (int64_t i = 0; i < channels; i += LANES) {
        vec z = load_some(g + i, lanes(i, channels));
        if (f.rate) {
            if (f.bias) z += load_some(f.bias + head * channels + i, lanes(i, channels));
            z = f.lower_bound < 0 ? all(f.lower_bound) * sigmoid_of(rate * z) : -rate * softplus_of(z);
        }
        store(to + i, exp_of(z));
    }
    for (int64_t i = LANES; f.gate == 2 && i < dim; i += LANES) store(to + i, all(to[0]));
    if (f.gate == 2) store(to, all(to[0]));
}

INLINE void prepare(Token &out, const Shape &s, const Form &f, const float *q, const float *k, const float *g, const float *beta,
                    int64_t row, int64_t head) {
    int64_t key_head = head / (s.value_heads / s.heads), dim = s.key_dim;
    int64_t at = (row * s.heads + key_head) * dim, own = row * s.value_heads + head;
    ready(out.q, q + at, dim, f.scale, f.norm);
    ready(out.k, k + at, dim, 1, f.norm);
    if (f.gate) fade(out.decay, f, g + own * (f.gate == 1 ? dim : 1), head, dim);
    for (int64_t i = 0; i < dim; i += LANES) {
        if (!f.gate) store(out.decay + i, all(1.0f));
        store(out.probe + i, load(out.k + i) * load(out.decay + i));
    }
    float b = f.additive ? 1 : beta[own];
    out.beta = f.beta_is_logit && !f.additive ? sigmoid(b) : b;
}

#define EACH _Pragma("GCC unroll 8") for (int n = 0; n < VECTORS; ++n)

struct Row {
    vec part[VECTORS];
};

// A row of `width` <= BLOCK numbers; what is missing of a block is zero.
INLINE Row load_row(const float *p, int64_t width = BLOCK) {
    Row x;
    if (width == BLOCK) {
        EACH x.part[n] = load(p + n * LANES);
        return x;
    }
    alignas(64) float padded[BLOCK] = {};
    for (int64_t j = 0; j < width; ++j) padded[j] = p[j];
    EACH x.part[n] = load(padded + n * LANES);
    return x;
}

INLINE void store_row(float *p, const Row &x, int64_t width = BLOCK) {
    if (width == BLOCK) {
        EACH store(p + n * LANES, x.part[n]);
        return;
    }
    alignas(64) float padded[BLOCK];
    EACH store(padded + n * LANES, x.part[n]);
    for (int64_t j = 0; j < width; ++j) p[j] = padded[j];
}

// A block of columns between its strided place and the contiguous buffer [K, BLOCK].
INLINE void fetch(float *block, const float *state, int64_t key_dim, int64_t value_dim, int64_t width) {
    for (int64_t i = 0; i < key_dim; ++i) store_row(block + i * BLOCK, load_row(state + i * value_dim, width));
}

INLINE void put(float *state, const float *block, int64_t key_dim, int64_t value_dim, int64_t width) {
    for (int64_t i = 0; i < key_dim; ++i) store_row(state + i * value_dim, load_row(block + i * BLOCK), width);
}

// What the first key of a tile retrieves from the block, whose rows are `pitch` floats apart.
INLINE Row retrieve(const float *block, int64_t pitch, const float *probe, int64_t key_dim) {
    Row a = {}, b = {};
    int64_t i = 0;
    for (; i + 1 < key_dim; i += 2) {
        EACH a.part[n] += probe[i] * load(block + i * pitch + n * LANES);
        EACH b.part[n] += probe[i + 1] * load(block + (i + 1) * pitch + n * LANES);
    }
    if (i < key_dim) EACH a.part[n] += probe[i] * load(block + i * pitch + n * LANES);
    EACH a.part[n] += b.part[n];
    return a;
}

// One token: forget, write k u^T, read into o, and probe with the next token's key. `from` and `to` may be one block.
INLINE void sweep(const float *from, float *to, int64_t pitch, const Token &t, const float *next, const Row &u, Row &o, Row &r,
                  int64_t key_dim) {
    Row read = {}, probe = {};
    for (int64_t i = 0; i < key_dim; ++i) {
        Row s;
        EACH s.part[n] = t.decay[i] * load(from + i * pitch + n * LANES) + t.k[i] * u.part[n];
        EACH store(to + i * pitch + n * LANES, s.part[n]);
        EACH read.part[n] += t.q[i] * s.part[n];
        EACH probe.part[n] += next[i] * s.part[n];
    }
    o = read;
    r = probe;
}

// Past the caches: a line that is written whole need not be read first.
INLINE void stream(float *p, vec x) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)x);
#elif defined(__AVX2__)
    _mm256_stream_ps(p, (__m256)x);
#else
    store(p, x);
#endif
}

// A single token, from one state into another without a copy between: decoding.
template <bool STREAM>
INLINE void single_token(const Shape &s, const Form &f, const Token &t, const float *v, const float *state, float *o,
                         float *final) {
    for (int64_t column = 0; column < s.value_dim; column += BLOCK) {
        Row r = {}, out;
        if (!f.additive) r = retrieve(state + column, s.value_dim, t.probe, s.key_dim);
        Row u = load_row(v + column);
        if (!f.additive) EACH u.part[n] = t.beta * (u.part[n] - r.part[n]);
        out = {};
        for (int64_t i = 0; i < s.key_dim; ++i) {
            const float *from = state + i * s.value_dim + column;
            float *to = final + i * s.value_dim + column;
            EACH {
                vec x = t.decay[i] * load(from + n * LANES) + t.k[i] * u.part[n];
                if (STREAM) stream(to + n * LANES, x); else store(to + n * LANES, x);
                out.part[n] += t.q[i] * x;
            }
        }
        store_row(o + column, out);
    }
}

// One document and one value head, from row `first` on. kept: null, or the states that enter each tile [tiles, K, V].
void forward_head(const Shape &s, const Form &f, const float *q, const float *k, const float *v, const float *g,
                         const float *beta, const float *state, float *o, float *final, float *kept, int64_t kept_step,
                         int64_t first, int64_t count, int64_t head, float *memory, Token *tile) {
    int64_t key_dim = s.key_dim, value_dim = s.value_dim, blocks = (value_dim + BLOCK - 1) / BLOCK, size = key_dim * BLOCK;
    if (count == 1 && !kept && value_dim % BLOCK == 0) {
        int64_t at = (first * s.value_heads + head) * value_dim;
        prepare(tile[0], s, f, q, k, g, beta, first, head);
        if (f.stream) single_token<true>(s, f, tile[0], v + at, state, o + at, final);
        else single_token<false>(s, f, tile[0], v + at, state, o + at, final);
        return;
    }
    for (int64_t b = 0; b < blocks; ++b) {
        int64_t width = value_dim - b * BLOCK < BLOCK ? value_dim - b * BLOCK : BLOCK;
        fetch(memory + b * size, state + b * BLOCK, key_dim, value_dim, width);
    }
    for (int64_t start = 0; start < count; start += TILE) {
        int64_t tokens = count - start < TILE ? count - start : TILE;
        for (int64_t t = 0; t < tokens; ++t) prepare(tile[t], s, f, q, k, g, beta, first + start + t, head);
        for (int64_t b = 0; b < blocks; ++b) {
            int64_t column = b * BLOCK, width = value_dim - column < BLOCK ? value_dim - column : BLOCK;
            float *block = memory + b * size;
            if (kept) put(kept + start / TILE * kept_step + column, block, key_dim, value_dim, width);
            Row r = {}, out;
            if (!f.additive) r = retrieve(block, BLOCK, tile[0].probe, key_dim);
            for (int64_t t = 0; t < tokens; ++t) {
                const Token &now = tile[t];
                int64_t at = ((first + start + t) * s.value_heads + head) * value_dim + column;
                Row u = load_row(v + at, width);
                if (!f.additive) EACH u.part[n] = now.beta * (u.part[n] - r.part[n]);
                sweep(block, block, BLOCK, now, tile[t + 1 < tokens ? t + 1 : t].probe, u, out, r, key_dim);
                store_row(o + at, out, width);
            }
        }
    }
    for (int64_t b = 0; b < blocks; ++b) {
        int64_t width = value_dim - b * BLOCK < BLOCK ? value_dim - b * BLOCK : BLOCK;
        put(final + b * BLOCK, memory + b * size, key_dim, value_dim, width);
    }
}

// ------------------------------------------------------------------------------------------------------------- backward

// The sums of LANES vectors, one to a lane: halves are added while they are exchanged, log2(LANES) times.
INLINE vec sums(vec *x) {
#if defined(__clang__)
    vec all_of_them;
    for (int i = 0; i < LANES; ++i) all_of_them[i] = total(x[i]);
    return all_of_them;
#else
#pragma GCC unroll 8
    for (int d = LANES / 2; d > 0; d /= 2) {
        ivec same, other;
#pragma GCC unroll 16
        for (int l = 0; l < LANES; ++l) {
            same[l] = (l & d) ? l + LANES : l;
            other[l] = (l & d) ? l - d + LANES : l + d;
        }
#pragma GCC unroll 16
        for (int i = 0; i < d; ++i) x[i] = __builtin_shuffle(x[i], x[i + d], same) + __builtin_shuffle(x[i], x[i + d], other);
    }
    return x[0];
#endif
}

// Gradients of one tile, summed over the blocks of columns.
struct Flow {
    float q[TILE][WIDEST], k[TILE][WIDEST], g[TILE][WIDEST], beta[TILE];
};

struct Grads {
    float *q, *k, *v, *g, *beta, *state;
};

// What the backward pass of one block keeps of a tile: every state on the way, what was written, what was missing.
struct Trace {
    float *states;  // [TILE + 1, padded K, BLOCK]
    Row u[TILE], missing[TILE];
};

INLINE void add(float *to, vec x) { store(to, load(to) + x); }

// One token backwards: `before` and `after` are its states, `flow` the gradient of the later one, turned into that of the
// earlier one.
INLINE Row token_back(float *flow, const float *before, const float *after, const Token &t, const Form &f, const Row &u,
                      const Row &missing, const Row &d_o, Flow &sum, int64_t at, int64_t padded) {
    Row d_u = {};
    for (int64_t i = 0; i < padded; i += LANES) {
        vec d_q[LANES];
        for (int l = 0; l < LANES; ++l) {
            float *row = flow + (i + l) * BLOCK;
            const float *state = after + (i + l) * BLOCK;
            vec read = {};
            EACH {
                vec d_s = load(row + n * LANES) + t.q[i + l] * d_o.part[n];
                store(row + n * LANES, d_s);
                d_u.part[n] += t.k[i + l] * d_s;
                read += load(state + n * LANES) * d_o.part[n];
            }
            d_q[l] = read;
        }
        add(sum.q[at] + i, sums(d_q));
    }
    Row d_v = d_u, d_r = {};
    if (!f.additive) {
        vec strength = {};
        EACH {
            strength += d_u.part[n] * missing.part[n];
            d_v.part[n] = t.beta * d_u.part[n];
            d_r.part[n] = -d_v.part[n];
        }
        for (int l = 0; l < LANES; ++l) sum.beta[at] += strength[l];
    }
    for (int64_t i = 0; i < padded; i += LANES) {
        vec d_k[LANES], d_g[LANES];
        for (int l = 0; l < LANES; ++l) {
            float *row = flow + (i + l) * BLOCK;
            const float *state = before + (i + l) * BLOCK;
            vec key = {}, gate = {};
            EACH {
                vec faded = t.decay[i + l] * load(state + n * LANES), d_s = load(row + n * LANES);
                key += d_s * u.part[n] + faded * d_r.part[n];
                vec d_faded = d_s + t.k[i + l] * d_r.part[n];
                gate += d_faded * faded;
                store(row + n * LANES, t.decay[i + l] * d_faded);
            }
            d_k[l] = key;
            d_g[l] = gate;
        }
        add(sum.k[at] + i, sums(d_k));
        if (f.gate) add(sum.g[at] + i, sums(d_g));
    }
    return d_v;
}

INLINE void write_flow(const Grads &d, const Flow &sum, const Shape &s, const Form &f, int64_t row, int64_t at, int64_t head) {
    int64_t place = row * s.value_heads + head;
    for (int64_t i = 0; i < s.key_dim; ++i) {
        d.q[place * s.key_dim + i] = sum.q[at][i];
        d.k[place * s.key_dim + i] = sum.k[at][i];
        if (f.gate == 1) d.g[place * s.key_dim + i] = sum.g[at][i];
    }
    if (f.gate == 2) {
        d.g[place] = 0;
        for (int64_t i = 0; i < s.key_dim; ++i) d.g[place] += sum.g[at][i];
    }
    if (!f.additive) d.beta[place] = sum.beta[at];
}

void backward_head(const Shape &s, const Form &f, const float *q, const float *k, const float *v, const float *g,
                   const float *beta, const float *kept, int64_t kept_step, const float *d_o, const Grads &d, int64_t first,
                   int64_t count, int64_t head, float *flow, Token *tile, Flow &total, Trace &trace) {
    int64_t key_dim = s.key_dim, value_dim = s.value_dim, blocks = (value_dim + BLOCK - 1) / BLOCK;
    int64_t padded = (key_dim + LANES - 1) / LANES * LANES, size = padded * BLOCK;
    std::memset(flow, 0, blocks * size * 4);
    std::memset(trace.states, 0, (TILE + 1) * size * 4);
    for (int64_t b = 0; b < blocks; ++b) {
        int64_t width = value_dim - b * BLOCK < BLOCK ? value_dim - b * BLOCK : BLOCK;
        fetch(flow + b * size, d.state + b * BLOCK, key_dim, value_dim, width);
    }
    for (int64_t start = (count - 1) / TILE * TILE; start >= 0 && count > 0; start -= TILE) {
        int64_t tokens = count - start < TILE ? count - start : TILE;
        for (int64_t t = 0; t < tokens; ++t) prepare(tile[t], s, f, q, k, g, beta, first + start + t, head);
        std::memset(&total, 0, sizeof(Flow));
        for (int64_t b = 0; b < blocks; ++b) {
            int64_t column = b * BLOCK, width = value_dim - column < BLOCK ? value_dim - column : BLOCK;
            int64_t at = ((first + start) * s.value_heads + head) * value_dim + column, step = s.value_heads * value_dim;
            fetch(trace.states, kept + start / TILE * kept_step + column, key_dim, value_dim, width);
            Row r = {}, out;
            if (!f.additive) r = retrieve(trace.states, BLOCK, tile[0].probe, key_dim);
            for (int64_t t = 0; t < tokens; ++t) {
                Row u = load_row(v + at + t * step, width);
                EACH trace.missing[t].part[n] = u.part[n] - r.part[n];
                if (!f.additive) EACH u.part[n] = tile[t].beta * trace.missing[t].part[n];
                trace.u[t] = u;
                float *state = trace.states + t * size;
                sweep(state, state + size, BLOCK, tile[t], tile[t + 1 < tokens ? t + 1 : t].probe, u, out, r, key_dim);
            }
            for (int64_t t = tokens - 1; t >= 0; --t) {
                const float *state = trace.states + t * size;
                Row d_out = load_row(d_o + at + t * step, width);
                Row d_v = token_back(flow + b * size, state, state + size, tile[t], f, trace.u[t], trace.missing[t], d_out,
                                     total, t, padded);
                store_row(d.v + at + t * step, d_v, width);
            }
        }
        for (int64_t t = 0; t < tokens; ++t) write_flow(d, total, s, f, first + start + t, t, head);
    }
    for (int64_t b = 0; b < blocks; ++b) {
        int64_t width = value_dim - b * BLOCK < BLOCK ? value_dim - b * BLOCK : BLOCK;
        put(d.state + b * BLOCK, flow + b * size, key_dim, value_dim, width);
    }
}

float *aligned(int64_t floats) { return (float *)std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64); }

#include "cpu_step.h"

// Numbers below 1e-38 slow a processor down a hundredfold and mean nothing here; the setting is the thread's own.
struct FlushSubnormals {
#if defined(__SSE__)
    unsigned before = __builtin_ia32_stmxcsr();
    FlushSubnormals() { __builtin_ia32_ldmxcsr(before | 0x8040); }
    ~FlushSubnormals() { __builtin_ia32_ldmxcsr(before); }
#endif
};


#include "cpu_product.h"
#include "cpu_layer.h"
#include "cpu_conv.h"

}  // namespace

extern "C" {

int64_t palimpsest_tile() { return TILE; }

// bounds [documents + 1]: rows of each document in [0, B*T]; state, final [documents, HV, K, V]; tiles [documents + 1]: where
// the kept states of each document begin in kept [tiles, HV, K, V] (both null when no backward pass follows).
void palimpsest_forward(const Shape *shape, const Form *form, const float *q, const float *k, const float *v, const float *g,
                        const float *beta, const float *state, float *o, float *final, float *kept, const int64_t *tiles,
                        const int64_t *bounds, int64_t documents, int32_t threads) {
    const Shape &s = *shape;
    int64_t matrix = s.key_dim * s.value_dim, blocks = (s.value_dim + BLOCK - 1) / BLOCK, longest = 1;
    for (int64_t row = 0; row < documents; ++row)
        if (bounds[row + 1] - bounds[row] > longest) longest = bounds[row + 1] - bounds[row];
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        FlushSubnormals flush;
        float *memory = aligned(blocks * s.key_dim * BLOCK);
        Token *tile = (Token *)aligned((longest < TILE ? longest : TILE) * (int64_t)sizeof(Token) / 4);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < documents * s.value_heads; ++item) {
            int64_t row = item / s.value_heads, head = item % s.value_heads;
            float *own = kept ? kept + (tiles[row] * s.value_heads + head) * matrix : nullptr;
            forward_head(s, *form, q, k, v, g, beta, state + item * matrix, o, final + item * matrix, own,
                         s.value_heads * matrix, bounds[row], bounds[row + 1] - bounds[row], head, memory, tile);
        }
        std::free(memory);
        std::free(tile);
    }
}

// Gradients under d_o; q, k already scaled and normed, g a log decay, beta a strength, H = HV, and kept as `forward` left it.
// grads->state [documents, HV, K, V] holds the gradient of the final state and leaves with that of the first.
void palimpsest_backward(const Shape *shape, const Form *form, const float *q, const float *k, const float *v, const float *g,
                         const float *beta, const float *kept, const int64_t *tiles, const float *d_o, const Grads *grads,
                         const int64_t *bounds, int64_t documents, int32_t threads) {
    const Shape &s = *shape;
    int64_t matrix = s.key_dim * s.value_dim, blocks = (s.value_dim + BLOCK - 1) / BLOCK;
    int64_t size = (s.key_dim + LANES - 1) / LANES * LANES * BLOCK;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        FlushSubnormals flush;
        float *flow = aligned(blocks * size);
        Token *tile = (Token *)aligned(TILE * (int64_t)sizeof(Token) / 4);
        Flow *total = (Flow *)aligned(sizeof(Flow) / 4);
        Trace *trace = (Trace *)aligned(sizeof(Trace) / 4);
        trace->states = aligned((TILE + 1) * size);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < documents * s.value_heads; ++item) {
            int64_t row = item / s.value_heads, head = item % s.value_heads;
            Grads own = *grads;
            own.state += item * matrix;
            backward_head(s, *form, q, k, v, g, beta, kept + (tiles[row] * s.value_heads + head) * matrix,
                          s.value_heads * matrix, d_o, own, bounds[row], bounds[row + 1] - bounds[row], head, flow, tile,
                          *total, *trace);
        }
        std::free(trace->states);
        for (void *place : {(void *)trace, (void *)total, (void *)tile, (void *)flow}) std::free(place);
    }
}

// y [n, rows] = x [n, columns] W^T with W packed [rows, columns / 2] and scale [rows, columns / 32].
void palimpsest_mxfp4(const uint8_t *packed, const uint8_t *scale, const float *x, float *y, int64_t n, int64_t rows,
                      int64_t columns, int32_t threads) {
    float *sorted = aligned(n * columns);
    for (int64_t t = 0; t < n; ++t) split(sorted + t * columns, x + t * columns, columns);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const uint8_t *codes = packed + row * (columns / 2), *scales = scale + row * (columns / 32);
        int64_t t = 0;
        for (; t + 4 <= n; t += 4) packed_row<4>(codes, scales, sorted + t * columns, y + t * rows + row, columns, rows);
        for (; t < n; ++t) packed_row<1>(codes, scales, sorted + t * columns, y + t * rows + row, columns, rows);
    }
    std::free(sorted);
}

// y [n, rows] = x [n, columns] W^T, x and y float32, or bfloat16 where `is_half`. W by `kind`: 0 float32, 1 bfloat16, 2 int8 with
// scale [rows, columns / 32] in float16. The first counts[0] rows of x meet the first of `groups` matrices, and so on.
void palimpsest_few(const void *weight, const uint16_t *scale, const void *x, void *y, int32_t kind, int32_t is_half, int64_t n,
                    int64_t rows, int64_t columns, const int64_t *counts, int64_t groups, int32_t threads) {
    Map map = {weight, scale, nullptr, rows, columns, kind, 0};
    Floats copy(is_half ? n * columns : 0), sums(is_half ? n * rows : 0);
    for (int64_t i = 0; is_half && i < n * columns; ++i) copy[i] = widened(((const uint16_t *)x)[i]);
    const float *in = is_half ? copy : (const float *)x;
    float *out = is_half ? sums : (float *)y;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t group = 0, first = 0; group < groups; first += counts[group++])
        product(expert(map, group), in + first * columns, out + first * rows, counts[group]);
    for (int64_t i = 0; is_half && i < n * rows; ++i) narrow(out[i], (uint16_t *)y + i);
}

// o [B, H, V]: the softmax of q [B, H, K] over the first lengths[b] rows of each sequence, all float32 or, `is_half`, bfloat16.
void palimpsest_attend(const Query *query, const Cache *cache, const void *q, const int64_t *lengths, void *o, int32_t threads) {
    const Query &a = *query;
    Parts parts(a, lengths, 0);
    int64_t queries = a.batch * a.heads * a.key_dim, results = a.batch * a.heads * a.value_dim;
    Floats copy(a.is_half ? queries : 0), sums(a.is_half ? results : 0);
    for (int64_t i = 0; a.is_half && i < queries; ++i) copy[i] = widened(((const uint16_t *)q)[i]);
    float *out = a.is_half ? sums : (float *)o;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        FlushSubnormals flush;
        if (a.is_half) attend_parts<uint16_t>(a, *cache, parts, copy);
        else attend_parts<float>(a, *cache, parts, (const float *)q);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < a.batch * a.heads; ++item)
            join_parts(a, parts, item / a.heads, item % a.heads, out + item * a.value_dim);
    }
    for (int64_t i = 0; a.is_half && i < results; ++i) narrow(out[i], (uint16_t *)o + i);
}

// y [n, columns] = x / sqrt(mean(x^2) + eps) * weight, row by row.
void palimpsest_rms_norm(const float *x, const float *weight, float *y, int64_t n, int64_t columns, float eps) {
    normalise({{weight, 0}, {nullptr, 0}, eps, 0}, {x, 0}, y, n, columns);
}

// Steps of sublayers, as cpu_layer.h has them: past [n]. Each reads x and writes y; with a width x [n, width] then grows by y.
void palimpsest_step(const Sublayer *sublayers, int64_t count, const Tokens *tokens, const int64_t *past, int64_t width) {
    for (int64_t i = 0; i < count; ++i) {
        sublayer_step(sublayers[i], *tokens, past);
        if (tokens->is_half) add((uint16_t *)tokens->x, (const uint16_t *)tokens->y, tokens->n * width);
        else add((float *)tokens->x, (const float *)tokens->y, tokens->n * width);
    }
}

// y [rows, C], for one to four taps; and gradients, as cpu_conv.h has them.
void palimpsest_conv(const Convolution *a, float *y, int32_t threads) {
    if (a->taps == 1) conv_forward<1>(*a, y, threads);
    if (a->taps == 2) conv_forward<2>(*a, y, threads);
    if (a->taps == 3) conv_forward<3>(*a, y, threads);
    if (a->taps == 4) conv_forward<4>(*a, y, threads);
}

void palimpsest_conv_backward(const Convolution *a, const ConvGrads *grads, int32_t threads) {
    if (a->taps == 1) conv_backward<1>(*a, *grads, threads);
    if (a->taps == 2) conv_backward<2>(*a, *grads, threads);
    if (a->taps == 3) conv_backward<3>(*a, *grads, threads);
    if (a->taps == 4) conv_backward<4>(*a, *grads, threads);
}
}
