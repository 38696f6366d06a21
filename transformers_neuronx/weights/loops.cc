// Loops over numbers of few bits: out of the blocks of ggml's types, into bytes, and into panels. Operations of PyTorch
// beside their calls, in `gguf_blocks.py`, `bits.py` and `panels.py`, define what they return.
//
// Numbers are taken four or eight at a time, as words of four or eight bytes.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

namespace {

constexpr int64_t kOutputs = 16;  // of a panel

template <typename Word>
Word Load(const void* from) {
  Word word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

template <typename Word>
void Store(void* to, Word word) {
  std::memcpy(to, &word, sizeof word);
}

// A word of equal bytes.
template <typename Word>
constexpr Word Repeated(int byte) {
  return static_cast<Word>(0x0101010101010101) * static_cast<Word>(byte);
}

// Finds the numbers of `bits` bits in `runs` runs of bytes: of a run, first the lowest bits of each byte, then the next
// ones, and so on. With `left`, they are shifted by so much, and added to those that are there.
template <int bits, int runs, int bytes, int left = 0>
inline void Find(const uint8_t* __restrict content, uint8_t* __restrict numbers) {
  using Word = std::conditional_t<bytes % 8 == 0, uint64_t, uint8_t>;
  for (int run = 0; run < runs; ++run, content += bytes)
    for (int right = 0; right < 8; right += bits, numbers += bytes)
      for (int at = 0; at < bytes; at += sizeof(Word)) {
        Word some = Load<Word>(content + at) >> right & Repeated<Word>((1 << bits) - 1);
        if (left > 0) some = static_cast<Word>(Load<Word>(numbers + at) | some << left);
        Store<Word>(numbers + at, some);
      }
}

// Whole scales and minima of a block.

void OfQ2K(const uint8_t* block, uint8_t* scales, uint8_t* minima) {
  for (int i = 0; i < 16; ++i) scales[i] = block[i] & 15, minima[i] = block[i] >> 4;
}

void OfQ3K(const uint8_t* block, uint8_t* scales, uint8_t*) {
  Find<4, 1, 8>(block + 96, scales);
  Find<2, 1, 4, 4>(block + 104, scales);
  for (int i = 0; i < 16; ++i) scales[i] = static_cast<uint8_t>(scales[i] - 32);
}

void InSixBits(const uint8_t* block, uint8_t* scales, uint8_t* minima) {
  const auto first = Load<uint32_t>(block + 4), second = Load<uint32_t>(block + 8), third = Load<uint32_t>(block + 12);
  constexpr auto kSix = Repeated<uint32_t>(63), kFour = Repeated<uint32_t>(15), kTwo = Repeated<uint32_t>(3);
  Store<uint32_t>(scales, first & kSix);
  Store<uint32_t>(scales + 4, (third & kFour) | (first >> 6 & kTwo) << 4);
  Store<uint32_t>(minima, second & kSix);
  Store<uint32_t>(minima + 4, (third >> 4 & kFour) | (second >> 6 & kTwo) << 4);
}

void OfQ6K(const uint8_t* block, uint8_t* scales, uint8_t*) { std::memcpy(scales, block + 192, 16); }

struct Type {
  std::string_view name;
  int64_t numbers, size;  // of a block, and its bytes
  void (*find)(const uint8_t* block, uint8_t* numbers);
  int64_t scales = 0, minima = 0;  // whole ones
  void (*of_groups)(const uint8_t* block, uint8_t* scales, uint8_t* minima) = nullptr;
};

constexpr Type kTypes[] = {
    {"Q4_0", 32, 18, [](const uint8_t* block, uint8_t* numbers) { Find<4, 1, 16>(block + 2, numbers); }},
    {"Q4_1", 32, 20, [](const uint8_t* block, uint8_t* numbers) { Find<4, 1, 16>(block + 4, numbers); }},
    {"Q5_0", 32, 22,
     [](const uint8_t* block, uint8_t* numbers) {
       Find<4, 1, 16>(block + 6, numbers);
       Find<1, 4, 1, 4>(block + 2, numbers);
     }},
    {"Q5_1", 32, 24,
     [](const uint8_t* block, uint8_t* numbers) {
       Find<4, 1, 16>(block + 8, numbers);
       Find<1, 4, 1, 4>(block + 4, numbers);
     }},
    {"Q8_0", 32, 34, [](const uint8_t* block, uint8_t* numbers) { std::memcpy(numbers, block + 2, 32); }},
    {"Q2_K", 256, 84,
     [](const uint8_t* block, uint8_t* numbers) { Find<2, 2, 32>(block + 16, numbers); },
     16, 16, OfQ2K},
    {"Q3_K", 256, 110,
     [](const uint8_t* block, uint8_t* numbers) {
       Find<2, 2, 32>(block + 32, numbers);
       Find<1, 1, 32, 2>(block, numbers);
     },
     16, 0, OfQ3K},
    {"Q4_K", 256, 144,
     [](const uint8_t* block, uint8_t* numbers) { Find<4, 4, 32>(block + 16, numbers); },
     8, 8, InSixBits},
    {"Q5_K", 256, 176,
     [](const uint8_t* block, uint8_t* numbers) {
       Find<4, 4, 32>(block + 48, numbers);
       Find<1, 1, 32, 4>(block + 16, numbers);
     },
     8, 8, InSixBits},
    {"Q6_K", 256, 210,
     [](const uint8_t* block, uint8_t* numbers) {
       Find<4, 2, 64>(block, numbers);
       Find<2, 2, 32, 4>(block + 128, numbers);
     },
     16, 0, OfQ6K},
};

void Unpack(const Type type, const uint8_t* blocks, int64_t count, uint8_t less, uint8_t* numbers, uint8_t* scales,
            uint8_t* minima) {
  for (; count > 0; --count, blocks += type.size, numbers += type.numbers) {
    type.find(blocks, numbers);
    for (int64_t i = 0; i < type.numbers; ++i) numbers[i] = static_cast<uint8_t>(numbers[i] - less);
    if (!type.of_groups) continue;
    type.of_groups(blocks, scales, minima);
    scales += type.scales;
    minima += type.minima;
  }
}

// The low four bits of eight numbers in four bytes: those of the first four in the low bits.
inline uint32_t Pairs(const uint8_t* values) {
  const uint64_t low = Load<uint64_t>(values) & Repeated<uint64_t>(15);
  return static_cast<uint32_t>(low | low >> 28);
}

// Numbers of 4 bits, or 4 and `high` more bits of numbers to which half of their range is added.
template <int high>
void Pack(const uint8_t* values, int64_t count, uint8_t* bytes) {
  constexpr int kTogether = high ? 32 / high : 8;
  for (int64_t at = 0; at < count; at += kTogether, values += kTogether) {
    uint8_t some[kTogether];
    for (int i = 0; i < kTogether; ++i) some[i] = static_cast<uint8_t>(values[i] + (high ? 8 << high : 0));
    for (int i = 0; i < kTogether; i += 8, bytes += 4) Store<uint32_t>(bytes, Pairs(some + i));
    if constexpr (high > 0) {
      uint32_t word = 0;
      for (int i = 0; i < kTogether; i += 4)
        word |= (Load<uint32_t>(some + i) >> 4 & Repeated<uint32_t>((1 << high) - 1)) << (i / 4 * high);
      Store<uint32_t>(bytes, word);
      bytes += 4;
    }
  }
}

// Rows of words, for which there is room in `panels` panels; zeros fill the rest.
template <typename Word>
void ToPanels(const uint8_t* rows, int64_t outputs, int64_t words, int64_t panels, uint8_t* laid) {
  for (int64_t panel = 0; panel < panels; ++panel, laid += words * kOutputs * sizeof(Word)) {
    const int64_t first = panel * kOutputs;
    const int64_t some = outputs - first < kOutputs ? outputs - first : kOutputs;
    if (some < kOutputs) std::memset(laid, 0, words * kOutputs * sizeof(Word));
    for (int64_t output = 0; output < some; ++output) {
      const uint8_t* row = rows + (first + output) * words * sizeof(Word);
      for (int64_t word = 0; word < words; ++word)
        Store<Word>(laid + (word * kOutputs + output) * sizeof(Word), Load<Word>(row + word * sizeof(Word)));
    }
  }
}

// An array of a call. It is let go at the end.
struct Array {
  Py_buffer buffer = {};
  ~Array() {
    if (buffer.obj) PyBuffer_Release(&buffer);
  }
  uint8_t* bytes() const { return static_cast<uint8_t*>(buffer.buf); }
  bool Has(int64_t size) const {
    if (buffer.len == size) return true;
    const auto wanted = static_cast<long long>(size);
    PyErr_Format(PyExc_ValueError, "expected an array of %lld bytes, got %zd", wanted, buffer.len);
    return false;
  }
};

PyObject* Unpacked(PyObject*, PyObject* given) {
  const char* name;
  int less;
  Array blocks, values, scales, minima;
  if (!PyArg_ParseTuple(given, "siy*w*w*w*", &name, &less, &blocks.buffer, &values.buffer, &scales.buffer,
                        &minima.buffer))
    return nullptr;
  for (const Type& type : kTypes) {
    if (type.name != name) continue;
    const int64_t count = blocks.buffer.len / type.size;
    if (!blocks.Has(count * type.size) || !values.Has(count * type.numbers) || !scales.Has(count * type.scales) ||
        !minima.Has(count * type.minima))
      return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    Unpack(type, blocks.bytes(), count, static_cast<uint8_t>(less), values.bytes(), scales.bytes(), minima.bytes());
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
  }
  return PyErr_Format(PyExc_ValueError, "no type is called %s", name);
}

PyObject* Packed(PyObject*, PyObject* given) {
  int bits;
  Array values, bytes;
  if (!PyArg_ParseTuple(given, "iy*w*", &bits, &values.buffer, &bytes.buffer)) return nullptr;
  const int64_t count = values.buffer.len, together = bits == 6 ? 16 : bits == 5 ? 32 : 8;
  if (bits < 4 || bits > 6) return PyErr_Format(PyExc_ValueError, "expected 4 to 6 bits, got %d", bits);
  if (!values.Has(count / together * together) || !bytes.Has(count / 8 * bits)) return nullptr;
  const auto pack = bits == 6 ? Pack<2> : bits == 5 ? Pack<1> : Pack<0>;
  Py_BEGIN_ALLOW_THREADS;
  pack(values.bytes(), count, bytes.bytes());
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* InPanels(PyObject*, PyObject* given) {
  long long outputs, words;
  int size;
  Array rows, laid;
  if (!PyArg_ParseTuple(given, "LLiy*w*", &outputs, &words, &size, &rows.buffer, &laid.buffer)) return nullptr;
  if ((size != 1 && size != 2 && size != 4) || words < 1 || words > laid.buffer.len)
    return PyErr_Format(PyExc_ValueError, "expected words of 1, 2 or 4 bytes, got %lld of %d", words, size);
  const int64_t panel = words * size * kOutputs, panels = laid.buffer.len / panel;
  if (outputs < 0 || outputs > panels * kOutputs)
    return PyErr_Format(PyExc_ValueError, "expected at most %lld outputs, got %lld", panels * kOutputs, outputs);
  if (!rows.Has(outputs * words * size) || !laid.Has(panels * panel)) return nullptr;
  const auto put = size == 4 ? ToPanels<uint32_t> : size == 2 ? ToPanels<uint16_t> : ToPanels<uint8_t>;
  Py_BEGIN_ALLOW_THREADS;
  put(rows.bytes(), outputs, words, panels, laid.bytes());
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"unpacked", Unpacked, METH_VARARGS,
     "(type, less, blocks, values, scales, minima): numbers of blocks minus `less`, whole scales and minima."},
    {"packed", Packed, METH_VARARGS, "(bits, values, bytes): put numbers of so many bits into bytes."},
    {"in_panels", InPanels, METH_VARARGS, "(outputs, words, size, rows, panels): put rows of words into panels."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_loops", "Loops over numbers of few bits.", -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__loops() { return PyModule_Create(&definition); }
