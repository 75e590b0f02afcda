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
INLINE vec wide_bf16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (vec)(__builtin_convertvector(*(const halves *)p, ivec) << 16);
#endif
}
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

INLINE vec factor_of_half(uint16_t h) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_set1_epi16(h));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_set1_epi16(h));
#else
    return all(wide_half(h));
#endif
}

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

// The first `count` numbers at p, and zeros.
template <typename Weight>
INLINE vec wide_some(const Weight *p, int64_t count) {
    vec x = {};
    for (int64_t l = 0; l < count; ++l) x[l] = widened(p[l]);
    return x;
}

// a b + c, rounded once where the processor can. Left to the compiler, some products are fused with their sums and others are not.
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && BYTES == 32
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// y[t] = <row, x[t]> for COUNT tokens against a row of float32 or bfloat16, and y[t][ahead] against the row `ahead` rows behind it.
template <int COUNT, typename Weight>
INLINE void plain_rows(const Weight *row, int64_t ahead, const float *x, float *y, int64_t columns, int64_t pitch) {
    vec first[COUNT] = {}, second[COUNT] = {};
    int64_t i = 0, next = ahead * columns, rest = columns % LANES;
    for (; i + LANES <= columns; i += LANES) {
        vec a = wide(row + i), b = wide(row + next + i);
#pragma GCC unroll 4
        for (int t = 0; t < COUNT; ++t) {
            vec here = load(x + t * columns + i);
            first[t] = fused(a, here, first[t]);
            second[t] = fused(b, here, second[t]);
        }
    }
    if (rest) {
        vec a = wide_some(row + i, rest), b = wide_some(row + next + i, rest);
#pragma GCC unroll 4
        for (int t = 0; t < COUNT; ++t) {
            vec here = load_some(x + t * columns + i, rest);
            first[t] = fused(a, here, first[t]);
            second[t] = fused(b, here, second[t]);
        }
    }
    for (int t = 0; t < COUNT; ++t) {
        y[t * pitch + ahead] = total(second[t]);
        y[t * pitch] = total(first[t]);
    }
}

// The same against rows of int8 with a float16 factor for every 32 columns.
template <int COUNT>
INLINE void q8_0_rows(const int8_t *row, const uint16_t *scale, int64_t ahead, const float *x, float *y, int64_t columns,
                      int64_t pitch) {
    int64_t next = ahead * columns;
    vec first[COUNT] = {}, second[COUNT] = {};
    for (int64_t group = 0; group < columns / 32; ++group) {
        vec factor = factor_of_half(scale[group]), other = factor_of_half(scale[next / 32 + group]);
        vec here[COUNT] = {}, there[COUNT] = {};
        for (int i = 0; i < 32; i += LANES) {
            vec a = wide_int8(row + group * 32 + i), b = wide_int8(row + next + group * 32 + i);
#pragma GCC unroll 4
            for (int t = 0; t < COUNT; ++t) {
                vec in = load(x + t * columns + group * 32 + i);
                here[t] += a * in;
                there[t] += b * in;
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < COUNT; ++t) {
            first[t] += factor * here[t];
            second[t] += other * there[t];
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

// Memory for one call.
struct Floats {
    float *data;
    explicit Floats(int64_t count) : data(aligned(count ? count : 1)) {}
    Floats(const Floats &) = delete;
    ~Floats() { std::free(data); }
    operator float *() const { return data; }
};

INLINE int64_t padded(int64_t floats) { return (floats + LANES - 1) / LANES * LANES; }

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

const int64_t AHEAD = 8;  // rows that are asked for before they are needed: memory answers later than the arithmetic takes

// <q, key> lane by lane: the sum of the vector that comes back.
template <typename Number>
INLINE vec dot(const float *q, const Number *key, int64_t dim) {
    vec even = {}, odd = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= dim; i += 2 * LANES) {
        even += load(q + i) * wide(key + i);
        odd += load(q + i + LANES) * wide(key + i + LANES);
    }
    for (; i + LANES <= dim; i += LANES) even += load(q + i) * wide(key + i);
    even += odd;
    for (; i < dim; ++i) even[0] += q[i] * widened(key[i]);
    return even;
}

// scores[s] <- exp(scores[s] - largest); the largest and the sum go to `extent`.
INLINE void weigh(float *scores, int64_t rows, float *extent) {
    for (int64_t s = rows; s < padded(rows); ++s) scores[s] = scores[rows - 1];
    vec most = load(scores), lost = {}, sum = {};
    for (int64_t s = 0; s < rows; s += LANES) {
        vec here = load(scores + s);
        most = choose(here > most, here, most);
        lost += choose(here == here, all(0.0f), here);  // NaN stays NaN
    }
    float largest = most[0];
    for (int l = 1; l < LANES; ++l) largest = most[l] > largest ? most[l] : largest;
    for (int64_t s = 0; s < rows; s += LANES) {
        store(scores + s, exp_of(load(scores + s) - all(largest)));
        sum += load_some(scores + s, lanes(s, rows));
    }
    extent[0] = largest;
    extent[1] = total(sum + lost);
}

// o += sum_s weight[s] value[s], four vectors of channels at a time.
template <typename Number>
INLINE void gather(const float *weights, const Number *values, int64_t row, int64_t count, int64_t dim, float *o) {
    int64_t c = 0;
    for (; c + 4 * LANES <= dim; c += 4 * LANES) {
        vec sum[4];
        for (int n = 0; n < 4; ++n) sum[n] = load(o + c + n * LANES);
        for (int64_t s = 0; s < count; ++s) {
            for (int64_t i = 0; i < 4 * LANES; i += 64 / sizeof(Number)) __builtin_prefetch(values + (s + AHEAD) * row + c + i);
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) sum[n] += all(weights[s]) * wide(values + s * row + c + n * LANES);
        }
        for (int n = 0; n < 4; ++n) store(o + c + n * LANES, sum[n]);
    }
    for (; c < dim; ++c)
        for (int64_t s = 0; s < count; ++s) o[c] += weights[s] * widened(values[s * row + c]);
}

// How the rows of each sequence are dealt out to threads: in parts that depend on its own length alone, so that sums do not depend
// on the threads or on who else is there. A part of a head leaves the weighted sum of its values, its largest score and the sum of
// its weights.
struct Parts {
    int64_t *lengths, *first;  // [batch], [batch + 1]: the parts in front of those of a sequence
    int64_t row, largest;
    Floats found;  // [parts, H, row]
    static int64_t size(int64_t length) { return 64 * ((length + 4095) / 4096); }  // at most 64 of them
    Parts(const Query &a, const int64_t *past, int64_t more)
        : lengths((int64_t *)aligned(4 * a.batch + 2)), first(lengths + a.batch), row(padded(a.value_dim) + LANES), largest(0),
          found(count(a, past, more) * a.heads * row) {}
    Parts(const Parts &) = delete;
    ~Parts() { std::free(lengths); }
    int64_t count(const Query &a, const int64_t *past, int64_t more) {
        first[0] = 0;
        for (int64_t b = 0; b < a.batch; ++b) {
            int64_t length = lengths[b] = past[b] + more, each = size(length);
            first[b + 1] = first[b] + (length + each - 1) / each;
            largest = each > largest ? each : largest;
        }
        return first[a.batch];
    }
};

// One part: `count` rows from `start` on. Memory is read from front to back, so all heads meet a row, or GROUP of them, before the
// next. products: room for [H, LANES] vectors.
template <typename Number>
INLINE void attend_part(const Query &a, const Cache &c, const float *q, int64_t b, int64_t start, int64_t count, int64_t row,
                        vec *products, float *scores, float *found) {
    const int64_t GROUP = 4;
    int64_t group = a.heads / a.key_heads, pitch = padded(count), extent = row - LANES;
    const Number *keys = (const Number *)c.keys + b * c.key_batch + start * c.key_row;
    const Number *values = (const Number *)c.values + b * c.value_batch + start * c.value_row;
    for (int64_t s = 0; s < count; s += LANES) {
        for (int64_t l = 0; l < LANES && s + l < count; ++l)
            for (int64_t h = 0; h < a.heads; ++h) {
                const Number *key = keys + (s + l) * c.key_row + h / group * c.key_head;
                for (int64_t i = 0; i < a.key_dim; i += 64 / sizeof(Number)) __builtin_prefetch(key + AHEAD * c.key_row + i);
                products[h * LANES + l] = dot(q + h * a.key_dim, key, a.key_dim);
            }
        for (int64_t h = 0; h < a.heads; ++h) store(scores + h * pitch + s, sums(products + h * LANES) * all(a.scale));
    }
    for (int64_t h = 0; h < a.heads; ++h) weigh(scores + h * pitch, count, found + h * row + extent);
    for (int64_t h = 0; h < a.heads; ++h) std::memset(found + h * row, 0, extent * 4);
    for (int64_t s = 0; s < count; s += GROUP)
        for (int64_t h = 0; h < a.heads; ++h)
            gather(scores + h * pitch + s, values + s * c.value_row + h / group * c.value_head, c.value_row,
                   count - s < GROUP ? count - s : GROUP, a.value_dim, found + h * row);
}

// All parts of q [batch, H, K]. Called by all threads, which share them and wait at the end.
template <typename Number>
INLINE void attend_parts(const Query &a, const Cache &c, const Parts &parts, const float *q) {
    Floats scores(a.heads * parts.largest), products(a.heads * LANES * LANES);
    std::memset(products, 0, a.heads * LANES * LANES * 4);
#pragma omp for schedule(dynamic, 1)
    for (int64_t part = 0; part < parts.first[a.batch]; ++part) {
        int64_t b = 0;
        while (parts.first[b + 1] <= part) ++b;
        int64_t each = Parts::size(parts.lengths[b]), start = (part - parts.first[b]) * each, left = parts.lengths[b] - start;
        attend_part<Number>(a, c, q + b * a.heads * a.key_dim, b, start, left < each ? left : each, parts.row,
                            (vec *)products.data, scores, parts.found + part * a.heads * parts.row);
    }
}

// o [V] of one head of a sequence from its parts, in their order.
INLINE void join_parts(const Query &a, const Parts &parts, int64_t b, int64_t h, float *o) {
    int64_t sums = parts.row - LANES, step = a.heads * parts.row;
    const float *begin = parts.found + parts.first[b] * step + h * parts.row, *end = parts.found + parts.first[b + 1] * step;
    float largest = begin[sums], whole = 0;
    for (const float *part = begin; part < end; part += step) largest = part[sums] > largest ? part[sums] : largest;
    for (int64_t i = 0; i < a.value_dim; ++i) o[i] = 0;
    for (const float *part = begin; part < end; part += step) {
        float factor = std::exp(part[sums] - largest);
        whole += factor * part[sums + 1];
        for (int64_t i = 0; i < a.value_dim; ++i) o[i] += factor * part[i];
    }
    for (int64_t i = 0; i < a.value_dim; ++i) o[i] /= whole;
}
