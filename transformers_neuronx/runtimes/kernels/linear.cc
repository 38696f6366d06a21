// The product of activations and a weight, as `layers/linear.py` has it.
//
// Both lie along the inputs, so a result is the sum of one vector of products: kTile x kTile of them are worked out
// at once, each load serving several. One row is bound by the reading of the weight; many rows find the weights of a
// piece in the processor's cache.
#include <type_traits>

#include "kinds.h"

namespace neuronx::NEURONX_LEVEL {
namespace {

constexpr int kTile = kLanes == 16 ? 4 : 2;
constexpr int64_t kFew = 16;  // rows, for which weights are not worth writing anew
constexpr int64_t kPieceBytes = 128 << 10;  // of weights: small beside a core's cache, large beside the cost of a piece

// Activations.

// A row of activations as a Kind has them. Returns what its results have to be multiplied by.
template <typename Kind>
float Prepare(const LinearArguments& a, int64_t first, float* out) {
  Widen(a.x, a.x_type, first, a.inputs, out);
  return 1;
}

template <typename Kind>
float Prepare(const LinearArguments& a, int64_t first, uint16_t* out) {
  memcpy(out, static_cast<const uint16_t*>(a.x) + first, a.inputs * sizeof(uint16_t));
  return 1;
}

// In integers. What is not finite reaches every result, as NaN.
template <typename Kind, typename Active>
float PrepareIntegers(const LinearArguments& a, int64_t first, Active* out) {
  const auto load = [&](int64_t i, float (&block)[BLOCK]) {
    const int64_t count = a.inputs - i < BLOCK ? a.inputs - i : BLOCK;
    memset(block, 0, sizeof block);
    Widen(a.x, a.x_type, first + i, count, block);
  };
  float block[BLOCK];
  Ints bits = {};  // of the largest: sizes are ordered as their bits are, and what is not finite comes last
  for (int64_t i = 0; i < a.inputs; i += BLOCK) {
    load(i, block);
    for (int64_t j = 0; j < BLOCK; j += kLanes) {
      const Ints size = Load<Ints>(block + j) & 0x7fffffff;
      bits = size > bits ? size : bits;
    }
  }
  int32_t most = 0;
  for (int lane = 0; lane < kLanes; ++lane) most = bits[lane] > most ? bits[lane] : most;
  const bool finite = most < 0x7f800000;
  const float largest = Cast<float>(most);
  const float inverse = finite && largest > 1e-30f ? Kind::LARGEST / largest : 0;  // beyond that it would be infinite
  for (int64_t i = 0; i < a.inputs; i += BLOCK) {
    load(i, block);
    int32_t whole[BLOCK] = {};
    for (int64_t j = 0; j < BLOCK && finite; j += kLanes) {
      const Ints some = Rounded(Load<Floats>(block + j) * inverse);
      memcpy(whole + j, &some, sizeof some);
    }
    Kind::Store(whole, i, a.group, out);
  }
  Kind::Finish(out, a.inputs);
  return finite ? largest / Kind::LARGEST : __builtin_nanf("");
}

template <typename Kind>
float Prepare(const LinearArguments& a, int64_t first, int16_t* out) {
  return PrepareIntegers<Kind>(a, first, out);
}

template <typename Kind>
float Prepare(const LinearArguments& a, int64_t first, int8_t* out) {
  return PrepareIntegers<Kind>(a, first, out);
}

// Weights come as a stream, which the processor has to be asked for long before, but not into its nearest cache. On two
// cores of a Zen 4, where reading alone gave 27 to 34 GB/s: one row of 4 bits at 25 GB/s in place of 10, eight rows of
// 8 bits at 16 in place of 10.
constexpr int64_t kAhead = 16 << 10;  // bytes

inline void Ask(const void* at) { __builtin_prefetch(static_cast<const char*>(at) + kAhead, 0, 2); }

// Results of ROWS rows of activations and OUTPUTS rows of the weight.
template <int ROWS, int OUTPUTS, typename Kind, bool ASK = true>
void Tile(Kind, const typename Kind::Weight* w, int64_t pitch, int64_t inputs, const typename Kind::Active* x,
          int64_t stride, Floats (&totals)[OUTPUTS][ROWS]) {
  const int64_t steps = inputs / Kind::STEP, rest = inputs % Kind::STEP;
  for (int64_t first = 0; first < steps; first += Kind::RUN) {
    const int64_t last = steps - first < Kind::RUN ? steps : first + Kind::RUN;
    typename Kind::Sums sums[OUTPUTS][ROWS] = {};
    for (int64_t step = first; step < last; ++step) {
      typename Kind::Vector active[ROWS];
      UNROLL for (int row = 0; row < ROWS; ++row) active[row] = Kind::LoadActive(x + row * stride + step * Kind::STEP);
      UNROLL for (int output = 0; output < OUTPUTS; ++output) {
        const auto* at = w + output * pitch + step * Kind::STEP;
        const auto weight = Kind::LoadWeight(at);
        if (ASK) Ask(at);
        UNROLL for (int row = 0; row < ROWS; ++row)
          sums[output][row] = Kind::Add(sums[output][row], weight, active[row]);
      }
    }
    UNROLL for (int output = 0; output < OUTPUTS; ++output)
      UNROLL for (int row = 0; row < ROWS; ++row) totals[output][row] += AsFloats(sums[output][row]);
  }
  if (!rest) return;
  for (int output = 0; output < OUTPUTS; ++output) {
    typename Kind::Weight part[Kind::STEP] = {};
    memcpy(part, w + output * pitch + steps * Kind::STEP, rest * sizeof part[0]);
    for (int row = 0; row < ROWS; ++row) {
      const auto active = Kind::LoadActive(x + row * stride + steps * Kind::STEP);
      totals[output][row] += AsFloats(Kind::Add(typename Kind::Sums{}, Kind::LoadWeight(part), active));
    }
  }
}

// As above, with scales for each step.
template <int ROWS, int OUTPUTS>
void Tile(S4, const uint8_t* w, int64_t inputs, const int8_t* x, int64_t stride, const float* scale, int64_t group,
          Floats (&totals)[OUTPUTS][ROWS]) {
  const int64_t bytes = inputs / 2, groups = inputs / group;
  const S4::Scales scales(inputs, group);
  for (int64_t step = 0; step < S4::Steps(inputs); ++step) {
    const int64_t rest = bytes - step * S4::BYTES;
    UNROLL for (int output = 0; output < OUTPUTS; ++output) {
      const uint8_t* at = w + output * bytes + step * S4::BYTES;
      Ask(at);
      const Nibbles both = (rest >= S4::BYTES ? Load<Nibbles>(at) : LoadPart<Nibbles>(at, rest)) ^ 0x88;  // 8 more
      const Floats factors = scales(scale + output * groups, step);
      UNROLL for (int row = 0; row < ROWS; ++row) {
        const S4::Step active(x + row * stride + step * S4::STEP);
        totals[output][row] += active.Times(both & 15, both >> 4) * factors;
      }
    }
  }
}

template <int ROWS, int OUTPUTS>
void Reduce(Floats (&totals)[OUTPUTS][ROWS], float (&results)[OUTPUTS][ROWS]) {
  if constexpr (ROWS * OUTPUTS == kLanes) {
    const Floats all = Totals(*reinterpret_cast<Floats(*)[kLanes]>(totals));
    memcpy(results, &all, sizeof all);
  } else {
    for (int output = 0; output < OUTPUTS; ++output)
      for (int row = 0; row < ROWS; ++row) results[output][row] = Total(totals[output][row]);
  }
}

template <typename Kind>
struct Product {
  const LinearArguments& arguments;
  int64_t stride;      // of a prepared row
  int64_t row_bytes;   // of the weight
  int64_t outputs;     // of a piece
  float* factors;      // [rows]
  typename Kind::Active* x;  // [rows, stride], zeros behind the inputs

  explicit Product(const LinearArguments& a) : arguments(a) {
    stride = Kind::Stride(a.inputs);
    row_bytes = a.inputs / Kind::PACKED * sizeof(typename Kind::Weight);
    outputs = RoundUp(kPieceBytes / row_bytes + 1, kTile);
    x = static_cast<typename Kind::Active*>(a.scratch);
    factors = reinterpret_cast<float*>(x + a.rows * stride);
  }

  int64_t Bytes() const { return arguments.rows * (stride * sizeof *x + sizeof *factors); }

  void PrepareRow(int64_t row) const {
    typename Kind::Active* out = x + row * stride;
    const int64_t behind = stride < 2 * Kind::STEP ? stride : 2 * Kind::STEP;
    memset(out + (stride - behind), 0, behind * sizeof *out);  // what has no inputs
    factors[row] = Prepare<Kind>(arguments, row * arguments.inputs, out);
  }

  template <int ROWS, int OUTPUTS>
  void Results(int64_t row, int64_t output) const {
    const char* w = static_cast<const char*>(arguments.weight) + output * row_bytes;
    const bool grouped = arguments.group > 0;
    const float* scales = arguments.scale + (grouped ? output * (arguments.inputs / arguments.group) : output);
    Floats totals[OUTPUTS][ROWS] = {};
    const auto* weights = reinterpret_cast<const typename Kind::Weight*>(w);
    const auto* active = x + row * stride;
    if constexpr (Kind::PACKED > 1)
      Tile<ROWS, OUTPUTS>(Kind{}, weights, arguments.inputs, active, stride, scales, arguments.group, totals);
    else
      Tile<ROWS, OUTPUTS>(Kind{}, weights, arguments.inputs, arguments.inputs, active, stride, totals);
    float results[OUTPUTS][ROWS];
    Reduce(totals, results);
    for (int j = 0; j < OUTPUTS; ++j) {
      const float scale = arguments.scale && !grouped ? scales[j] : 1;
      for (int i = 0; i < ROWS; ++i)
        arguments.y[(row + i) * arguments.outputs + output + j] = results[j][i] * (factors[row + i] * scale);
    }
  }

  template <int ROWS>
  void Rows(int64_t row, int64_t first, int64_t last) const {
    int64_t output = first;
    for (; ROWS > 1 && output + kTile <= last; output += kTile) Results<ROWS, kTile>(row, output);
    for (; output < last; ++output) Results<ROWS, 1>(row, output);
  }

  void Piece(int64_t piece) const {
    const int64_t first = piece * outputs;
    const int64_t last = first + outputs < arguments.outputs ? first + outputs : arguments.outputs;
    int64_t row = 0;
    for (; row + kTile <= arguments.rows; row += kTile) Rows<kTile>(row, first, last);
    switch (arguments.rows - row) {
      case 3: return Rows<3>(row, first, last);
      case 2: return Rows<2>(row, first, last);
      case 1: return Rows<1>(row, first, last);
    }
  }

  void Run(const Pool& pool) const {
    const auto rows = [](void* self, int64_t row) { static_cast<const Product*>(self)->PrepareRow(row); };
    const auto pieces = [](void* self, int64_t piece) { static_cast<const Product*>(self)->Piece(piece); };
    void* self = const_cast<Product*>(this);
    pool.run(pool.pool, arguments.rows, rows, self);
    pool.run(pool.pool, (arguments.outputs + outputs - 1) / outputs, pieces, self);
  }
};

// Rows enough to write the weights anew, a block of outputs and inputs at a time, as the numbers that are multiplied
// fastest, scales of groups included. Rows that are used together must not lie whole pages apart: they would take each
// other's place in the cache.
template <typename Kind>
struct Many {
  using Number = typename Kind::Active;
  static constexpr int64_t kInputs = 4096 / sizeof(Number), kOutputs = 32, kApart = 64 / sizeof(Number);
  static constexpr int64_t kPitch = kInputs + kApart;

  const LinearArguments& a;
  int64_t stride;  // of a prepared row
  Number* x;       // [rows, stride], zeros behind the inputs

  explicit Many(const LinearArguments& a)
      : a(a), stride(Kind::Stride(a.inputs) + kApart), x(static_cast<Number*>(a.scratch)) {}

  int64_t Bytes() const { return a.rows * stride * sizeof *x; }

  void PrepareRow(int64_t row) const {
    const int64_t whole = a.inputs / Kind::STEP * Kind::STEP;
    memset(x + row * stride + whole, 0, (stride - whole) * sizeof *x);
    Prepare<Kind>(a, row * a.inputs, x + row * stride);
  }

  void Piece(int64_t piece) const {
    alignas(64) Number block[kOutputs * kPitch];
    const int64_t output = piece * kOutputs, outputs = a.outputs - output < kOutputs ? a.outputs - output : kOutputs;
    for (int64_t input = 0; input < a.inputs; input += kInputs) {
      const int64_t inputs = a.inputs - input < kInputs ? a.inputs - input : kInputs;
      for (int64_t i = 0; i < kOutputs; ++i) {
        Number* to = block + i * kPitch;
        memset(to, 0, kPitch * sizeof *to);
        if (i < outputs) Write(output + i, input, inputs, to);
      }
      int64_t row = 0;
      for (; row + kTile <= a.rows; row += kTile) Rows<kTile>(row, input, inputs, output, outputs, block);
      for (; row < a.rows; ++row) Rows<1>(row, input, inputs, output, outputs, block);
    }
  }

  template <int ROWS>
  void Rows(int64_t row, int64_t input, int64_t inputs, int64_t output, int64_t outputs, const Number* block) const {
    for (int64_t first = 0; first < outputs; first += kTile) {
      Floats totals[kTile][ROWS] = {};
      const auto* w = reinterpret_cast<const typename Kind::Weight*>(block + first * kPitch);
      Tile<ROWS, kTile, Kind, false>(Kind{}, w, kPitch, RoundUp(inputs, Kind::STEP), x + row * stride + input, stride, totals);
      float results[kTile][ROWS];
      Reduce(totals, results);
      for (int j = 0; j < kTile && first + j < outputs; ++j) {
        for (int i = 0; i < ROWS; ++i) {
          float& y = a.y[(row + i) * a.outputs + output + first + j];
          y = (input ? y : 0) + results[j][i];
        }
      }
    }
  }

  // Some inputs of an output.
  void Write(int64_t output, int64_t input, int64_t count, Number* to) const {
    float wide[kInputs];
    if (a.weight_type == Type::kS4)
      WriteGroups(output, input, count, wide);
    else
      Widen(a.weight, a.weight_type, output * a.inputs + input, count, wide);
    Narrow(wide, sizeof(Number) == 2 ? Type::kBF16 : Type::kF32, count, to, 0);
  }

  void WriteGroups(int64_t output, int64_t input, int64_t count, float* to) const {
    const int64_t half = a.group / 2;
    const uint8_t* row = static_cast<const uint8_t*>(a.weight) + output * (a.inputs / 2);
    for (int64_t i = input; i < input + count; i += BLOCK) {
      const int64_t group = i / a.group, inside = i % a.group;
      const float scale = a.scale[output * (a.inputs / a.group) + group];
      const uint8_t* from = row + group * half + inside % half;
      const int shift = inside < half ? 0 : 4;
      UNROLL for (int64_t j = 0; j < BLOCK; ++j)
        to[i - input + j] = static_cast<float>((((from[j] >> shift) & 15) ^ 8) - 8) * scale;
    }
  }

  void Run(const Pool& pool) const {
    const auto rows = [](void* self, int64_t row) { static_cast<const Many*>(self)->PrepareRow(row); };
    const auto pieces = [](void* self, int64_t piece) { static_cast<const Many*>(self)->Piece(piece); };
    void* self = const_cast<Many*>(this);
    pool.run(pool.pool, a.rows, rows, self);
    pool.run(pool.pool, RoundUp(a.outputs, kOutputs) / kOutputs, pieces, self);
  }
};

// `use` with the product of the arguments' kind.
template <typename Use>
void WithKind(const LinearArguments& arguments, const Use& use) {
  using Halves = std::conditional_t<sizeof(BF16::Active) == 2, BF16, F32>;
  const bool many = arguments.rows > kFew;
  switch (arguments.weight_type) {
    case Type::kF32: return use(Product<F32>(arguments));
    case Type::kBF16: return use(Product<BF16>(arguments));
    case Type::kS8: return use(Product<S8>(arguments));
    case Type::kF16: return many ? use(Many<F32>(arguments)) : use(Product<F16>(arguments));
    case Type::kS4:
      if (!many) return use(Product<S4>(arguments));
      return arguments.x_type == Type::kBF16 ? use(Many<Halves>(arguments)) : use(Many<F32>(arguments));
  }
}

}  // namespace

int64_t LinearScratch(const LinearArguments& arguments) {
  int64_t bytes = 0;
  WithKind(arguments, [&](const auto& product) { bytes = product.Bytes(); });
  return bytes;
}

void Linear(const LinearArguments& arguments, const Pool& pool) {
  WithKind(arguments, [&](const auto& product) { product.Run(pool); });
}

}  // namespace neuronx::NEURONX_LEVEL
