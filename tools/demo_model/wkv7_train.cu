// RWKV-7 recurrence with a backward pass, head size 64, fp32: enough to train the demo model.
// One block per (sequence, head), one thread per row (forward) and per row and column (backward).
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

constexpr int N = 64;   // head size
constexpr int CH = 16;  // tokens between the states kept for the backward pass

__global__ void fwd(int T, int H, const float* __restrict__ r, const float* __restrict__ w, const float* __restrict__ k,
                    const float* __restrict__ v, const float* __restrict__ a, const float* __restrict__ b,
                    float* __restrict__ y, float* __restrict__ s, float* __restrict__ sa_out) {
  const int bh = blockIdx.x, h = bh % H, bb = bh / H, i = threadIdx.x;
  __shared__ float R[N], W[N], K[N], A[N], B[N];
  float S[N];
#pragma unroll
  for (int j = 0; j < N; j++) S[j] = 0.f;
  for (int t = 0; t < T; t++) {
    const long p = ((long(bb) * T + t) * H + h) * N + i;
    __syncthreads();
    R[i] = r[p]; W[i] = w[p]; K[i] = k[p]; A[i] = a[p]; B[i] = b[p];
    __syncthreads();
    float sa = 0.f;
#pragma unroll
    for (int j = 0; j < N; j++) sa += S[j] * A[j];
    sa_out[p] = sa;
    const float vi = v[p];
    float yy = 0.f;
#pragma unroll
    for (int j = 0; j < N; j++) {
      S[j] = S[j] * W[j] + vi * K[j] + sa * B[j];
      yy += S[j] * R[j];
    }
    y[p] = yy;
    if ((t + 1) % CH == 0) {
      const long q = ((long(bb) * H + h) * (T / CH) + t / CH) * N * N;
#pragma unroll
      for (int j = 0; j < N; j++) s[q + j * N + i] = S[j];  // [column][row]
    }
  }
}

__global__ void bwd(int T, int H, const float* __restrict__ r, const float* __restrict__ w, const float* __restrict__ k,
                    const float* __restrict__ v, const float* __restrict__ a, const float* __restrict__ b,
                    const float* __restrict__ dy, const float* __restrict__ s, const float* __restrict__ sa,
                    float* dr, float* dw, float* dk, float* dv, float* da, float* db) {
  const int bh = blockIdx.x, h = bh % H, bb = bh / H, i = threadIdx.x;
  __shared__ float R[N], W[N], K[N], A[N], B[N], V[N], DY[N], SA[N], DSA[N];
  float C[N], DC[N], DR[N];  // column i of the state, column i and row i of its gradient
#pragma unroll
  for (int j = 0; j < N; j++) DC[j] = DR[j] = 0.f;
  for (int t = T - 1; t >= 0; t--) {
    const long p = ((long(bb) * T + t) * H + h) * N + i;
    __syncthreads();
    R[i] = r[p]; W[i] = w[p]; K[i] = k[p]; A[i] = a[p]; B[i] = b[p]; V[i] = v[p]; DY[i] = dy[p]; SA[i] = sa[p];
    __syncthreads();
    if ((t + 1) % CH == 0) {
      const long q = ((long(bb) * H + h) * (T / CH) + t / CH) * N * N + i * N;
#pragma unroll
      for (int j = 0; j < N; j++) C[j] = s[q + j];
    }
    const float wi = W[i], ki = K[i], bi = B[i], ri = R[i], ai = A[i], dyi = DY[i], iw = 1.f / wi;
    float gr = 0.f, gw = 0.f, gk = 0.f, gb = 0.f, gv = 0.f, gsa = 0.f, ga = 0.f;
#pragma unroll
    for (int j = 0; j < N; j++) {
      gr += C[j] * DY[j];
      C[j] = (C[j] - ki * V[j] - bi * SA[j]) * iw;
      DC[j] += DY[j] * ri;
      gw += DC[j] * C[j]; gk += DC[j] * V[j]; gb += DC[j] * SA[j];
      DR[j] += dyi * R[j];
      gv += DR[j] * K[j]; gsa += DR[j] * B[j];
    }
    DSA[i] = gsa;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; j++) {
      ga += C[j] * DSA[j];
      DC[j] = DC[j] * wi + DSA[j] * ai;
      DR[j] = DR[j] * W[j] + gsa * A[j];
    }
    dr[p] = gr; dw[p] = gw; dk[p] = gk; dv[p] = gv; da[p] = ga; db[p] = gb;
  }
}

void forward(torch::Tensor r, torch::Tensor w, torch::Tensor k, torch::Tensor v, torch::Tensor a, torch::Tensor b,
             torch::Tensor y, torch::Tensor s, torch::Tensor sa) {
  const int B = r.size(0), T = r.size(1), H = r.size(2);
  fwd<<<B * H, N, 0, c10::cuda::getCurrentCUDAStream()>>>(
      T, H, r.data_ptr<float>(), w.data_ptr<float>(), k.data_ptr<float>(), v.data_ptr<float>(), a.data_ptr<float>(),
      b.data_ptr<float>(), y.data_ptr<float>(), s.data_ptr<float>(), sa.data_ptr<float>());
}

void backward(torch::Tensor r, torch::Tensor w, torch::Tensor k, torch::Tensor v, torch::Tensor a, torch::Tensor b,
              torch::Tensor dy, torch::Tensor s, torch::Tensor sa, torch::Tensor dr, torch::Tensor dw, torch::Tensor dk,
              torch::Tensor dv, torch::Tensor da, torch::Tensor db) {
  const int B = r.size(0), T = r.size(1), H = r.size(2);
  bwd<<<B * H, N, 0, c10::cuda::getCurrentCUDAStream()>>>(
      T, H, r.data_ptr<float>(), w.data_ptr<float>(), k.data_ptr<float>(), v.data_ptr<float>(), a.data_ptr<float>(),
      b.data_ptr<float>(), dy.data_ptr<float>(), s.data_ptr<float>(), sa.data_ptr<float>(), dr.data_ptr<float>(),
      dw.data_ptr<float>(), dk.data_ptr<float>(), dv.data_ptr<float>(), da.data_ptr<float>(), db.data_ptr<float>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &forward);
  m.def("backward", &backward);
}
