// Tile registers of AMX, and products of two tiles that are added to a third.
//
// Registers 0 to 3 hold sums, 4 and 5 rows of activations, 6 and 7 weights. A row of a tile has up to 64 bytes: 16
// sums, or up to 16 units of 4 bytes, which are pairs of bfloat16 or four int8. A row of weights is a unit of 16
// outputs. Instruction sets without AMX compute the same bits from the definitions of TDPBF16PS, TDPBSUD and TDPBSSD in
// Intel's Software Developer's Manual, volume 2.

namespace PENSTOCK_NAMESPACE {

constexpr int kTileHeight = 16;  // rows of a tile, at most
constexpr int kTileWidth = 16;   // outputs of a tile
constexpr int kTileRowBytes = 64;
constexpr int kRowsTile = 4, kWeightsTile = 6;  // the first ones of their kind

#if defined(PENSTOCK_TILES)
constexpr bool kHasTileProducts = true;

// The processor's registers, in use for the lifetime of the object: without tiles in use, the operating system saves
// less when it switches threads. Other code of the thread may have configured them otherwise before.
class TileRegisters {
 public:
  // num_rows: of activations and sums. num_units: per row of activations.
  TileRegisters(int num_rows, int num_units) : num_rows_(num_rows), num_units_(num_units) { configure(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() { asm volatile("tilerelease"); }

  // Changes the number of rows; what the registers hold is lost.
  void set_rows(int num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    configure();
  }

  template <int kTile>
  __attribute__((always_inline)) void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  // stride: bytes from row to row.
  template <int kTile>
  __attribute__((always_inline)) void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  __attribute__((always_inline)) void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  // Sums += rows * weights, of pairs of bfloat16.
  template <int kSums, int kRows, int kWeights>
  __attribute__((always_inline)) void add_bfloat16_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kWeights));
  }
  // int32 sums += rows * weights, of signed bytes and of unsigned or signed ones.
  template <int kSums, int kRows, int kWeights, bool kUnsignedWeights>
  __attribute__((always_inline)) void add_byte_products() {
    if constexpr (kUnsignedWeights)
      asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kWeights));
    else
      asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kRows), "i"(kWeights));
  }

 private:
  void configure() const {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t num_rows[16];
    } shapes{};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      const bool is_input = tile == kRowsTile || tile == kRowsTile + 1;
      shapes.row_bytes[tile] = static_cast<uint16_t>(is_input ? 4 * num_units_ : kTileRowBytes);
      shapes.num_rows[tile] = static_cast<uint8_t>(tile < kWeightsTile ? num_rows_ : num_units_);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }

  int num_rows_, num_units_;
};
#else
constexpr bool kHasTileProducts = false;

class TileRegisters {
 public:
  TileRegisters(int num_rows, int num_units) : num_rows_(num_rows), num_units_(num_units) {}

  void set_rows(int num_rows) { num_rows_ = num_rows; }

  template <int kTile>
  void zero() {
    std::memset(tiles_[kTile], 0, sizeof tiles_[kTile]);
  }
  template <int kTile>
  void load_tile(const void* from, int64_t stride) {
    zero<kTile>();
    for (int row = 0; row < num_rows<kTile>(); ++row)
      std::memcpy(tiles_[kTile][row], static_cast<const char*>(from) + row * stride, row_bytes<kTile>());
  }
  template <int kTile>
  void store_tile(void* to, int64_t stride) const {
    for (int row = 0; row < num_rows<kTile>(); ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, tiles_[kTile][row], row_bytes<kTile>());
  }
  // First and second elements are added apart, unit after unit, then together, then to the sums.
  template <int kSums, int kRows, int kWeights>
  void add_bfloat16_products() {
    for (int row = 0; row < num_rows_; ++row)
      for (int column = 0; column < kTileWidth; column += kLanes) {
        Vec first{}, second{};
        for (int unit = 0; unit < num_units_; ++unit) {
          const Vec x = splat_pair(tiles_[kRows][row] + unit), w = load(tiles_[kWeights][unit] + column);
          multiply_add(first, first_of(x), first_of(w));
          first = without_denormals(first);
          multiply_add(second, second_of(x), second_of(w));
          second = without_denormals(second);
        }
        float* const sums = tiles_[kSums][row] + column;
        const Vec both = without_denormals(first + second);
        store(sums, without_denormals(without_denormals(load(sums)) + both));
      }
  }
  template <int kSums, int kRows, int kWeights, bool kUnsignedWeights>
  void add_byte_products() {
    for (int row = 0; row < num_rows_; ++row)
      for (int unit = 0; unit < num_units_; ++unit) {
        int8_t x[4];
        std::memcpy(x, tiles_[kRows][row] + unit, sizeof x);
        for (int column = 0; column < kTileWidth; ++column) {
          uint8_t w[4];
          int32_t sum;
          std::memcpy(w, tiles_[kWeights][unit] + column, sizeof w);
          std::memcpy(&sum, tiles_[kSums][row] + column, sizeof sum);
          for (int i = 0; i < 4; ++i) sum += x[i] * (kUnsignedWeights ? w[i] : static_cast<int8_t>(w[i]));
          std::memcpy(tiles_[kSums][row] + column, &sum, sizeof sum);
        }
      }
  }

 private:
  template <int kTile>
  int num_rows() const {
    return kTile < kWeightsTile ? num_rows_ : num_units_;
  }
  template <int kTile>
  size_t row_bytes() const {
    return kTile == kRowsTile || kTile == kRowsTile + 1 ? static_cast<size_t>(4 * num_units_) : kTileRowBytes;
  }

  int num_rows_, num_units_;
  float tiles_[8][kTileHeight][kTileRowBytes / sizeof(float)] = {};
};
#endif

}  // namespace PENSTOCK_NAMESPACE
