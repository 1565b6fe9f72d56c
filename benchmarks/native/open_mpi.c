// The same collectives by MPI, timed when asked to: commands and answers as in floors.cpp.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t kMostBytes = (size_t)64 << 20;

static int run(const char* op, float* input, float* output, int count, int rank, int size, int turn) {
  const int peer = rank ^ 1;
  if (strcmp(op, "allreduce") == 0) {
    MPI_Allreduce(MPI_IN_PLACE, input, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  } else if (strcmp(op, "broadcast") == 0) {
    MPI_Bcast(input, count, MPI_FLOAT, turn % size, MPI_COMM_WORLD);
  } else if (strcmp(op, "allgather") == 0) {
    MPI_Allgather(input, count / size, MPI_FLOAT, output, count / size, MPI_FLOAT, MPI_COMM_WORLD);
  } else if (strcmp(op, "reduce_scatter") == 0) {
    MPI_Reduce_scatter_block(input, output, count / size, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  } else if (strcmp(op, "alltoall") == 0) {
    MPI_Alltoall(input, count / size, MPI_FLOAT, output, count / size, MPI_FLOAT, MPI_COMM_WORLD);
  } else if (strcmp(op, "pair") == 0) {
    MPI_Sendrecv(input, count, MPI_FLOAT, peer, 0, output, count, MPI_FLOAT, peer, 0, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
  } else {
    return 1;
  }
  return 0;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, size, turn = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  float *input = NULL, *output = NULL;
  if (posix_memalign((void**)&input, 4096, kMostBytes) || posix_memalign((void**)&output, 4096, kMostBytes)) return 1;
  memset(input, 0, kMostBytes);

  char name[4096], line[256], op[32], place[32];
  snprintf(name, sizeof(name), "%s/in%d", argv[1], rank);
  FILE* commands = fopen(name, "r");
  snprintf(name, sizeof(name), "%s/out%d", argv[1], rank);
  FILE* answers = fopen(name, "w");
  if (!commands || !answers) return 1;
  fprintf(answers, "ready\n");
  fflush(answers);
  while (fgets(line, sizeof(line), commands)) {
    size_t num_bytes, inner;
    if (sscanf(line, "%31s %31s %*s %zu %zu", op, place, &num_bytes, &inner) != 4) break;
    const int count = (int)(num_bytes / sizeof(float));
    for (int i = 0; i < (num_bytes < 1 << 20 ? 5 : 1); ++i) {
      if (run(op, input, output, count, rank, size, ++turn)) return 1;
    }
    double seconds = 0;
    if (strchr(place, '+') != NULL) {
      for (size_t i = 0; i < inner; ++i) {
        memset(input, 0, num_bytes);
        MPI_Barrier(MPI_COMM_WORLD);
        const double start = MPI_Wtime();
        run(op, input, output, count, rank, size, ++turn);
        seconds += MPI_Wtime() - start;
      }
    } else {
      const double start = MPI_Wtime();
      for (size_t i = 0; i < inner; ++i) run(op, input, output, count, rank, size, ++turn);
      seconds = MPI_Wtime() - start;
    }
    fprintf(answers, "%.9e\n", seconds / (double)inner);
    fflush(answers);
  }
  MPI_Finalize();
  return 0;
}
