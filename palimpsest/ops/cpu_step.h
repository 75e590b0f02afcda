// What a step of a few tokens needs beside the recurrence: products with weights of few bits, and softmax attention of one query.
// Part of cpu.cpp, which includes it inside its namespace.

// ---------------------------------------------------------------------------------------------------- four-bit weights

// LANES bytes as integers. The compiler's own conversion goes by single bytes.
INLINE ivec widen(const uint8_t *p) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    ivec x;
    for (int l = 0; l < LANES; ++l) x[l] = p[l];
    return x;
#endif
}

// The values of codes 0..15 (E2M1, the upper eight negated).
INLINE vec value_of(ivec code) {
    alignas(64) static const float table[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
#if defined(__clang__) || BYTES == 16
    vec x;
    for (int l = 0; l < LANES; ++l) x[l] = table[code[l]];
    return x;
#elif BYTES == 32
    return __builtin_shuffle(*(const vec *)table, *(const vec *)(table + LANES), code);
#else
    return __builtin_shuffle(*(const vec *)table, code);
#endif
}

// The factor of a scale: 2^(scale - 127), NaN for 255.
INLINE float factor_of(uint8_t scale) {
    uint32_t bits = scale == 255 ? 0x7fc00000 : scale == 0 ? 0x00400000 : (uint32_t)scale << 23;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// y[t] = <row, x[t]> for COUNT tokens; x as `split` leaves it: of every 32 columns first the even, then the odd ones.
template <int COUNT>
INLINE void packed_row(const uint8_t *packed, const uint8_t *scale, const float *x, float *y, int64_t columns, int64_t pitch) {
    vec even[COUNT] = {}, odd[COUNT] = {};
    for (int64_t group = 0; group < columns / 32; ++group) {
        float factor = factor_of(scale[group]);
        for (int part = 0; part < 16; part += LANES) {
            ivec code = widen(packed + group * 16 + part);
            vec low = factor * value_of(code & 15), high = factor * value_of(code >> 4);
            const float *here = x + group * 32 + part;
#pragma GCC unroll 4
            for (int t = 0; t < COUNT; ++t) {
                even[t] += low * load(here + t * columns);
                odd[t] += high * load(here + t * columns + 16);
            }
        }
    }
    for (int t = 0; t < COUNT; ++t) {
        vec total = even[t] + odd[t];
        float sum = 0;
        for (int l = 0; l < LANES; ++l) sum += total[l];
        y[t * pitch] = sum;
    }
}

typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2)));
typedef int8_t bytes_of __attribute__((vector_size(LANES), aligned(1)));

// bfloat16 is the upper half of a float32.
INLINE vec wide_bf16(const uint16_t *p) { return (vec)(__builtin_convertvector(*(const halves *)p, ivec) << 16); }
INLINE vec wide_int8(const int8_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const bytes_of *)p, ivec), vec);
#endif
}

INLINE float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Finite float16 numbers only, subnormal ones too.
INLINE float wide_half(uint16_t h) { return float_of((h & 0x7fffu) << 13) * (h & 0x8000u ? -0x1p112f : 0x1p112f); }

INLINE uint16_t narrow_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE void narrow(float x, float *out) { *out = x; }
INLINE void narrow(float x, uint16_t *out) { *out = narrow_bf16(x); }

INLINE vec wide(const float *p) { return load(p); }
INLINE vec wide(const uint16_t *p) { return wide_bf16(p); }
INLINE float widened(float x) { return x; }
INLINE float widened(uint16_t x) { return float_of((uint32_t)x << 16); }

// y[t] = <row, x[t]> for COUNT tokens against a row of float32 or bfloat16, and y[t][ahead] against the row `ahead` rows behind it.
template <int COUNT, typename Weight>
INLINE void plain_rows(const Weight *row, int64_t ahead, const float *x, float *y, int64_t columns, int64_t pitch) {
    vec first[COUNT] = {}, second[COUNT] = {};
    int64_t i = 0, next = ahead * columns;
    for (; i + LANES <= columns; i += LANES) {
        vec a = wide(row + i), b = wide(row + next + i);
#pragma GCC unroll 4
        for (int t = 0; t < COUNT; ++t) {
            vec here = load(x + t * columns + i);
            first[t] += a * here;
            second[t] += b * here;
        }
    }
    for (int t = 0; t < COUNT; ++t) {
        float sum = total(first[t]), other = total(second[t]);
        for (int64_t n = i; n < columns; ++n) {
            sum += widened(row[n]) * x[t * columns + n];
            other += widened(row[next + n]) * x[t * columns + n];
        }
        y[t * pitch + ahead] = other;
        y[t * pitch] = sum;
    }
}

// The same against rows of int8 with a float16 factor for every 32 columns.
template <int COUNT>
INLINE void q8_0_rows(const int8_t *row, const uint16_t *scale, int64_t ahead, const float *x, float *y, int64_t columns,
                      int64_t pitch) {
    int64_t next = ahead * columns;
    vec first[COUNT] = {}, second[COUNT] = {};
    for (int64_t group = 0; group < columns / 32; ++group) {
        vec factor = all(wide_half(scale[group])), other = all(wide_half(scale[next / 32 + group]));
        for (int i = group * 32; i < group * 32 + 32; i += LANES) {
            vec a = factor * wide_int8(row + i), b = other * wide_int8(row + next + i);
#pragma GCC unroll 4
            for (int t = 0; t < COUNT; ++t) {
                vec here = load(x + t * columns + i);
                first[t] += a * here;
                second[t] += b * here;
            }
        }
    }
    for (int t = 0; t < COUNT; ++t) {
        y[t * pitch + ahead] = total(second[t]);
        y[t * pitch] = total(first[t]);
    }
}

template <int COUNT>
INLINE void any_rows(int32_t kind, const void *weight, const uint16_t *scale, int64_t start, int64_t ahead, const float *x, float *y,
                     int64_t columns, int64_t pitch) {
    if (kind == 0) plain_rows<COUNT>((const float *)weight + start, ahead, x, y, columns, pitch);
    if (kind == 1) plain_rows<COUNT>((const uint16_t *)weight + start, ahead, x, y, columns, pitch);
    if (kind == 2) q8_0_rows<COUNT>((const int8_t *)weight + start, scale + start / 32, ahead, x, y, columns, pitch);
}

INLINE void split(float *out, const float *x, int64_t columns) {
    for (int64_t i = 0; i < columns; ++i) out[i / 32 * 32 + i % 2 * 16 + i % 32 / 2] = x[i];
}

// ----------------------------------------------------------------------------------------------- one query against many rows

// Where the rows of one sequence lie: row s of a key head at base + s * row + head * head_stride, counted in numbers.
struct Cache {
    const void *keys, *values;
    int64_t key_batch, key_row, key_head, value_batch, value_row, value_head;
};

struct Query {
    int64_t batch, heads, key_heads, key_dim, value_dim;
    float scale;
    int32_t is_half;
};

// scores[s] = scale <q, key s> for up to LANES rows.
template <typename Number>
INLINE void score(const float *q, const Number *keys, int64_t row, int64_t count, int64_t dim, float scale, float *scores) {
    vec sum[LANES] = {};
    for (int64_t l = 0; l < count; ++l) {
        const Number *key = keys + l * row;
        vec even = {}, odd = {};
        int64_t i = 0;
        for (; i + 2 * LANES <= dim; i += 2 * LANES) {
            even += load(q + i) * wide(key + i);
            odd += load(q + i + LANES) * wide(key + i + LANES);
        }
        for (; i + LANES <= dim; i += LANES) even += load(q + i) * wide(key + i);
        sum[l] = even + odd;
        for (; i < dim; ++i) sum[l][0] += q[i] * widened(key[i]);
    }
    store(scores, sums(sum) * all(scale));
}

// scores[s] <- exp(scores[s] - largest); the sum comes back.
INLINE float weigh(float *scores, int64_t rows) {
    float largest = scores[0], sum = 0, lost = 0;
    for (int64_t s = 0; s < rows; ++s) {
        largest = scores[s] > largest ? scores[s] : largest;
        lost += scores[s] == scores[s] ? 0 : scores[s];  // NaN stays NaN
    }
    for (int64_t first = 0; first < rows; first += LANES) store(scores + first, exp_of(load(scores + first) - all(largest)));
    for (int64_t s = 0; s < rows; ++s) sum += scores[s];
    return sum + lost;
}

// o += sum_s weight[s] value[s] over up to LANES rows, four vectors of channels at a time.
template <typename Number>
INLINE void gather(const float *weights, const Number *values, int64_t row, int64_t count, int64_t dim, float *o) {
    int64_t c = 0;
    for (; c + 4 * LANES <= dim; c += 4 * LANES) {
        vec sum[4];
        for (int n = 0; n < 4; ++n) sum[n] = load(o + c + n * LANES);
        for (int64_t s = 0; s < count; ++s)
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) sum[n] += all(weights[s]) * wide(values + s * row + c + n * LANES);
        for (int n = 0; n < 4; ++n) store(o + c + n * LANES, sum[n]);
    }
    for (; c < dim; ++c)
        for (int64_t s = 0; s < count; ++s) o[c] += weights[s] * widened(values[s * row + c]);
}

INLINE int64_t padded(int64_t floats) { return (floats + LANES - 1) / LANES * LANES; }

// Heads [first, last) of one sequence. Heads lie beside one another in memory, so a few rows of all pass before the next few.
template <typename Number, typename Outer>
INLINE void attend_heads(const Query &a, const Cache &c, const Outer *q, int64_t length, Outer *o, int64_t b, int64_t first,
                         int64_t last, float *room) {
    int64_t group = a.heads / a.key_heads, row_q = padded(a.key_dim), row_o = padded(a.value_dim), row_s = padded(length);
    float *queries = room, *results = queries + a.heads * row_q, *scores = results + a.heads * row_o;
    const Number *keys = (const Number *)c.keys + b * c.key_batch, *values = (const Number *)c.values + b * c.value_batch;
    for (int64_t h = first; h < last; ++h)
        for (int64_t i = 0; i < a.key_dim; ++i) queries[h * row_q + i] = widened(q[(b * a.heads + h) * a.key_dim + i]);
    for (int64_t s = 0; s < length; s += LANES)
        for (int64_t h = first; h < last; ++h)
            score(queries + h * row_q, keys + s * c.key_row + h / group * c.key_head, c.key_row,
                  length - s < LANES ? length - s : LANES, a.key_dim, a.scale, scores + h * row_s + s);
    float total[last - first];
    for (int64_t h = first; h < last; ++h) total[h - first] = weigh(scores + h * row_s, length);
    std::memset(results + first * row_o, 0, (last - first) * row_o * 4);
    for (int64_t s = 0; s < length; s += LANES)
        for (int64_t h = first; h < last; ++h)
            gather(scores + h * row_s + s, values + s * c.value_row + h / group * c.value_head, c.value_row,
                   length - s < LANES ? length - s : LANES, a.value_dim, results + h * row_o);
    for (int64_t h = first; h < last; ++h)
        for (int64_t i = 0; i < a.value_dim; ++i)
            narrow(results[h * row_o + i] / total[h - first], o + (b * a.heads + h) * a.value_dim + i);
}
