// The short causal convolution of many tokens, and its gradients: z once for every token, and all sums of z' in one walk.
//
//     z[t] = sum_j w[j] x[t-W+1+j]    y[t] = z[t] sigmoid(z[t])
//     z' = y' SiLU'(z)    x'[t] = sum_d w[W-1-d] z'[t+d]    w'[j] = sum_t z'[t] x[t-W+1+j]
//
// Channels do not see one another: a vector of them walks over a strip of tokens with its last inputs (backwards: its last z') in
// registers. Part of cpu.cpp, which includes it inside its namespace.
//
// Strips depend on the length of their own sequence alone, and w' is summed over a fixed number of them at a time and then over
// these sums in order: no result depends on the threads, and all but w' on no other sequence.

const int64_t STRIP = 64, STRIPS = 8, CHANNELS = 128;  // tokens; strips that one sum of w' covers; channels of an item of work

struct Convolution {
    const float *x, *weight, *state;  // [rows, C], rows `row` numbers apart; [C, W]; [sequences, W - 1, C]
    const int64_t *bounds;            // [sequences + 1]: rows of each sequence
    int64_t row, sequences, channels, taps;
};

// Tokens start .. start + count of a sequence of `length` tokens, whose first row is `first`. An empty sequence has one strip of none.
struct Strip {
    int64_t sequence, first, length, start, count;
};

struct Strips {
    int64_t count;
    Strip *data;
    explicit Strips(const Convolution &a) : count(0) {
        for (int64_t s = 0; s < a.sequences; ++s) count += pieces(a.bounds[s + 1] - a.bounds[s]);
        data = (Strip *)aligned(count * (int64_t)sizeof(Strip) / 4 + 1);
        int64_t at = 0;
        for (int64_t s = 0; s < a.sequences; ++s) {
            int64_t first = a.bounds[s], length = a.bounds[s + 1] - first;
            for (int64_t start = 0; start < length || start == 0; start += STRIP)
                data[at++] = {s, first, length, start, length - start < STRIP ? length - start : STRIP};
        }
    }
    Strips(const Strips &) = delete;
    ~Strips() { std::free(data); }
    static int64_t pieces(int64_t length) { return length ? (length + STRIP - 1) / STRIP : 1; }
};

// [W, padded C]: the taps of neighbouring channels lie together, zeros behind the last.
struct Taps {
    Floats data;
    int64_t pitch;
    explicit Taps(const Convolution &a) : data(a.taps * padded(a.channels)), pitch(padded(a.channels)) {
        std::memset(data, 0, a.taps * pitch * 4);
        for (int64_t c = 0; c < a.channels; ++c)
            for (int64_t j = 0; j < a.taps; ++j) data[j * pitch + c] = a.weight[c * a.taps + j];
    }
};

INLINE void put_some(float *p, vec x, int64_t count) { count == LANES ? store(p, x) : store_some(p, x, count); }

// 1 / (1 + e^-z) by an exponential that does not overflow: 0 where z is far below, however far.
INLINE vec opening(vec z) {
    ivec below = z < all(0.0f);
    vec e = exp_of(choose(below, z, -z));
    return choose(below, e, all(1.0f)) / (all(1.0f) + e);
}

// `some` <= LANES channels of one sequence from number `channel` on, at its token t; left of the first token stands the state.
template <int W>
struct Inputs {
    const float *x, *state;
    int64_t row, channels, some;
    Inputs(const Convolution &a, const Strip &s, int64_t channel)
        : x(a.x + s.first * a.row + channel), state(a.state + s.sequence * (W - 1) * a.channels + channel), row(a.row),
          channels(a.channels), some(lanes(channel, a.channels)) {}
    __attribute__((always_inline)) vec at(int64_t t) const { return load_some(t < 0 ? state + (W - 1 + t) * channels : x + t * row, some); }
};

template <int W>
INLINE vec mixed(const vec *w, const vec *in) {
    vec z = w[0] * in[0];
#pragma GCC unroll 4
    for (int j = 1; j < W; ++j) z = fused(w[j], in[j], z);
    return z;
}

template <int W>
void conv_strip(const Convolution &a, const Taps &taps, const Strip &s, float *y, int64_t channel) {
    Inputs<W> inputs(a, s, channel);
    vec w[W], in[W];
    for (int j = 0; j < W; ++j) w[j] = load(taps.data + j * taps.pitch + channel);
    for (int j = 1; j < W; ++j) in[j] = s.count ? inputs.at(s.start - W + j) : all(0.0f);
    for (int64_t t = s.start; t < s.start + s.count; ++t) {
#pragma GCC unroll 4
        for (int j = 1; j < W; ++j) in[j - 1] = in[j];
        in[W - 1] = load_some(inputs.x + t * a.row, inputs.some);
        vec z = mixed<W>(w, in);
        put_some(y + (s.first + t) * a.channels + channel, z * opening(z), inputs.some);
    }
}

// Gradients under d_y, whose rows are d_row apart; d_x [rows, C], d_state as the state or null, d_w [W, padded C] is added to.
struct ConvGrads {
    const float *y;
    int64_t row;
    float *x, *state, *weight;
};

// From the strip's end to its start. The W - 1 tokens behind it reach its inputs, so their z' is formed here too.
template <int W>
void conv_strip_back(const Convolution &a, const Taps &taps, const Strip &s, const ConvGrads &d, float *d_w, int64_t channel) {
    Inputs<W> inputs(a, s, channel);
    int64_t some = inputs.some, end = s.start + s.count, last = (end + W - 1 < s.length ? end + W - 1 : s.length) - 1;
    vec w[W], in[W] = {}, flow[W] = {}, part[W];
    for (int j = 0; j < W; ++j) w[j] = load(taps.data + j * taps.pitch + channel);
    for (int j = 0; j < W; ++j) part[j] = load(d_w + j * taps.pitch + channel);
    for (int j = 1; j < W && s.count; ++j) in[j - 1] = inputs.at(last - W + 1 + j);  // those of the token behind `last`
    for (int64_t t = last; t >= s.start; --t) {
#pragma GCC unroll 4
        for (int j = W - 1; j > 0; --j) in[j] = in[j - 1], flow[j] = flow[j - 1];
        in[0] = inputs.at(t - W + 1);
        vec z = mixed<W>(w, in), open = opening(z);
        flow[0] = load_some(d.y + (s.first + t) * d.row + channel, some) * open * fused(z, all(1.0f) - open, all(1.0f));
        if (t >= end) continue;
        vec d_x = w[W - 1] * flow[0];
#pragma GCC unroll 4
        for (int j = 0; j < W; ++j) part[j] = fused(flow[0], in[j], part[j]);
#pragma GCC unroll 4
        for (int j = 1; j < W; ++j) d_x = fused(w[W - 1 - j], flow[j], d_x);
        put_some(d.x + (s.first + t) * a.channels + channel, d_x, some);
    }
    for (int j = 0; j < W; ++j) store(d_w + j * taps.pitch + channel, part[j]);
    for (int64_t t = -1; d.state && s.start == 0 && t > -W; --t) {
        for (int j = W - 1; j > 0; --j) flow[j] = flow[j - 1];
        flow[0] = all(0.0f);
        vec d_x = all(0.0f);
        for (int j = 1; j < W; ++j) d_x = fused(w[W - 1 - j], flow[j], d_x);
        put_some(d.state + (s.sequence * (W - 1) + W - 1 + t) * a.channels + channel, d_x, some);
    }
}

template <int W>
void conv_forward(const Convolution &a, float *y, int32_t threads) {
    Strips strips(a);
    Taps taps(a);
    int64_t blocks = (a.channels + CHANNELS - 1) / CHANNELS;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        FlushSubnormals flush;
#pragma omp for schedule(static)
        for (int64_t item = 0; item < strips.count * blocks; ++item) {
            int64_t c = item % blocks * CHANNELS, end = c + CHANNELS < a.channels ? c + CHANNELS : a.channels;
            for (; c < end; c += LANES) conv_strip<W>(a, taps, strips.data[item / blocks], y, c);
        }
    }
}

template <int W>
void conv_backward(const Convolution &a, const ConvGrads &d, int32_t threads) {
    Strips strips(a);
    Taps taps(a);
    int64_t blocks = (a.channels + CHANNELS - 1) / CHANNELS, groups = (strips.count + STRIPS - 1) / STRIPS, size = W * taps.pitch;
    Floats parts(groups * size);
    std::memset(parts, 0, groups * size * 4);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        FlushSubnormals flush;
#pragma omp for schedule(static)
        for (int64_t item = 0; item < groups * blocks; ++item) {
            int64_t group = item / blocks, first = item % blocks * CHANNELS, next = group * STRIPS + STRIPS;
            int64_t end = first + CHANNELS < a.channels ? first + CHANNELS : a.channels;
            for (int64_t strip = group * STRIPS; strip < next && strip < strips.count; ++strip)
                for (int64_t c = first; c < end; c += LANES)
                    conv_strip_back<W>(a, taps, strips.data[strip], d, parts + group * size, c);
        }
#pragma omp for schedule(static)
        for (int64_t c = 0; c < (d.weight ? a.channels : 0); ++c)
            for (int64_t j = 0; j < W; ++j) {
                float sum = 0;
                for (int64_t group = 0; group < groups; ++group) sum += parts[group * size + j * taps.pitch + c];
                d.weight[c * W + j] = sum;
            }
    }
}
